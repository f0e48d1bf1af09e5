"""main_plan on a tiny model: table, JSON, page, lengths of a run, and its errors."""

import json
from pathlib import Path

import pytest

from tests.runs import make_task, ppo_arguments
from trainer import main_plan, main_ppo

RAY = "trainer.backend=ray"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=8, sft_size=8)


def planned(task: Path, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str, int]:
    capsys.readouterr()
    code = 0
    try:
        main_plan.main([*ppo_arguments(task, folder / "run"), RAY, *words])
    except SystemExit as error:
        code = int(str(error.code))
    out, err = capsys.readouterr()
    return out, err, code


def test_plan_is_printed_and_written_and_nothing_is_started(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err, code = planned(task, tmp_path, capsys, "cluster=1x2xcpu", f"output={tmp_path}/plan", "plans=2")
    assert code == 0, err
    assert "answers" in out and "actor: update" in out and "binds: time:" in out and "\n1. " in out and "\n3. " not in out
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [*found] == ["command", "plan", "alternatives"] and len(found["alternatives"]) == 2
    assert found["plan"]["seconds"] == pytest.approx(max(phase["end"] for phase in found["plan"]["phases"]))
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert "<svg" in page and "actor: update" in page and "<script" not in page
    assert not (tmp_path / "run").exists()


def test_simulated_steps_and_failures_are_in_the_table_and_the_page(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("simulate=6", "failure_hours=0.5", "restart_seconds=20", "save_seconds=2.5", "plans=1", f"output={tmp_path}/plan")
    out, err, code = planned(task, tmp_path, capsys, "cluster=1x2xcpu", *words)
    assert code == 0, err
    assert "simulated: 6 steps of" in out and "a node lost every 0.5 h; 2.5 s a checkpoint, 20 s a restart" in out
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert len(found["simulated"]["steps"]) == 6
    assert f"trainer.save_freq={found['failures']['save_freq']} keeps" in out
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert "Running sequences" in page and "Goodput" in page and page.count("<svg") == 3


def test_alternatives_pass_the_dry_run(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(task, tmp_path, capsys, "cluster=1x2xcpu", f"output={tmp_path}/plan", "plans=3")
    for plan in json.loads((tmp_path / "plan" / "plan.json").read_text())["alternatives"]:
        words = ppo_arguments(
            task, tmp_path / "run", RAY, "trainer.n_gpus_per_node=2", *plan["overrides"], "trainer.dry_run=full"
        )
        assert main_ppo.PROGRAM(words) == 0, capsys.readouterr().err
        assert "more than there is" not in capsys.readouterr().out


def test_lengths_are_read_from_a_run(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = [number / 4 for number in range(1, 21)]
    lines = [{"response_length/mean": mean, "response_length/max": 7, "prompt_length/mean": 5} for mean in means]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out, err, code = planned(task, tmp_path, capsys, "cluster=1x1xcpu", f"lengths={metrics}", "plans=1")
    assert code == 0 and "responses of 5 tokens on average, 7 at most" in out, err  # of the last two of 20 lines
    out, err, code = planned(task, tmp_path, capsys, "cluster=1x1xcpu", f"lengths={metrics}", "data.max_response_length=6")
    assert code == 2 and "4.875:7, needs mean <= maximum <= data.max_response_length=6" in err
    with metrics.open("a") as file:
        file.write('{"response_length/mean": "NaN", "response_length/max": 7, "prompt_length/mean": 5}\n{"response_length/m')
    out, err, code = planned(task, tmp_path, capsys, "cluster=1x1xcpu", f"lengths={metrics}", "plans=0")
    assert code == 0 and "responses of 5 tokens on average, 7 at most" in out and "no settings fit" not in out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "error: cluster=null: the GPUs to plan for are not named; set cluster=2x8xH100"),
        (("cluster=1x1xH10",), "did you mean"),
        (("cluster=1x1xcpu", "lengths=9:4"), "lengths=9:4: 9:4, needs mean <= maximum"),
        (("cluster=1x1xcpu", "lengths=none.jsonl"), "lengths=none.jsonl: no such file"),
        (("cluster=1x1xcpu", "data.train_batch_size=999"), "data.train_batch_size=999"),
        (("cluster=1x1xcpu", "plans=none"), "plans=none: must be a number"),
        (("cluster=1x1xcpu", "simulate=-1"), "simulate=-1: must be a number"),
        (("cluster=1x1xcpu", "failure_hours=0"), "failure_hours=0: must be a number of hours above 0"),
        (("cluster=1x3xcpu", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=3"), "num_attention_heads=4"),
        (("cluster=1x1xcpu", f"output={__file__}"), "test_main_plan.py: is a file; name a directory"),
        (("cluster=1x1xcpu", "save_seconds=5"), "save_seconds has no effect without failures; set for example failure_hours=12"),
    ],
)
def test_errors_are_one_line(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    _, err, code = planned(task, tmp_path, capsys, *words)
    assert code == 2 and message in err and "Traceback" not in err
