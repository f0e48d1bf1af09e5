import io

from rich.console import Console

from trainer.run.logger import Sample
from trainer.tracking.console import ConsoleLogger, step_line

METRICS = {"critic/score/mean": 0.5312, "actor/lr": 3e-4, "perf/throughput": 12345.6, "timing_s/step": 0.417, "made/up": 1.0}


def test_line_has_the_metrics_of_the_step() -> None:
    assert step_line(METRICS, 7, 100) == "step   7/100  score 0.531  lr 3.0e-04  s 0.42  tok/s/gpu 12,346"
    assert step_line({"val/accuracy": 0.5}, 0, None) == "step 0  held-out 0.500"


def test_line_fits_the_terminal_without_its_last_metrics() -> None:
    metrics = METRICS | {"reward/failed": 3.0}
    whole = step_line(metrics, 7, 100)
    for width in range(len(whole) + 2):
        line = step_line(metrics, 7, 100, width)
        assert whole.startswith(line) and whole[len(line) :][:2] in ("  ", "") and (len(line) <= width or line == "step   7/100")
    assert step_line(metrics, 7, 100, 50) == "step   7/100  failed rewards 3  score 0.531"
    assert step_line(metrics, 7, 100, len(whole)) == whole != step_line(metrics, 7, 100, len(whole) - 1)


def test_output_without_a_terminal_is_plain_lines() -> None:
    out = io.StringIO()
    logger = ConsoleLogger(Console(file=out, width=40), 2)
    logger.log(METRICS, 1)
    logger.log(METRICS, 2)
    logger.close()
    assert out.getvalue().splitlines() == [step_line(METRICS, 1, 2), step_line(METRICS, 2, 2)]


def test_samples_are_printed_without_markup() -> None:
    out = io.StringIO()
    ConsoleLogger(Console(file=out, width=100), None).log_samples(
        [
            Sample(
                uid=i, data_source="s", prompt="[red]1+1[/red]=", response="[/]", ground_truth="2", score=0.5, reward_error=error
            )
            for i, error in enumerate([None, "late"])
        ],
        3,
    )
    assert "[red]1+1[/red]=" in out.getvalue() and "[/]" in out.getvalue() and "0.5" in out.getvalue()
    assert "none: late" in out.getvalue(), "no score is not a score of 0"
