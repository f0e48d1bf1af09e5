import io
from typing import Any, cast

from rich.console import Console

from trainer.run.logger import Sample
from trainer.tracking.console import ConsoleLogger, step_line
from trainer.tracking.conversation import conversation_of

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


def printed(**changes: Any) -> str:
    out = io.StringIO()
    sample = Sample(uid=1, data_source="s", prompt="p\x1b[2J", response="r\x07", ground_truth="2", score=0.5, reward_error=None)
    ConsoleLogger(Console(file=out, width=120), None).log_samples([cast(Sample, sample | changes)], 3)
    return out.getvalue()


def test_conversation_is_printed_in_a_few_lines() -> None:
    calls = [{"id": "a", "function": {"name": "add", "arguments": '{"x": "[red]"}'}}]
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": calls, "sampled": True, "reward": 0.25},
        {"role": "tool", "tool_call_id": "a", "content": "\x1b[31m" + "long " * 1000, "status": "ok"},
        {"role": "assistant", "content": "2", "sampled": True},
    ]
    out = printed(conversation=conversation_of(messages))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert cells[0] == ["user: 1+1?", 'assistant: add(x="[red]")  [reward 0.25]', "2", "0.5"]
    assert cells[1][1].startswith("tool add: \\x1b[31mlong long") and cells[-1][1] == "assistant: 2"
    assert len(cells) < 7 and "\x1b" not in out


def test_control_characters_of_a_response_do_not_reach_the_terminal() -> None:
    out = printed()
    assert "p\\x1b[2J" in out and "r\\x07" in out and "\x1b" not in out
