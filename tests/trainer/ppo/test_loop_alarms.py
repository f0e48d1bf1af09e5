"""Runs that diverge or whose rewards fail, and what they report. In one process."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import make_task, metrics_of, ppo_arguments, run_ppo, without_eos
from trainer import main_ppo
from trainer.run.run_dir import EVENTS, REPORT, read_lines

TEN = ("trainer.total_training_steps=10",)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def reward(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n")
    return f"reward.custom_reward_function.path={folder}/mine.py"


def reported(run_dir: Path) -> list[tuple[int, str, str]]:
    """Step, kind, and the beginning of the text."""
    return [(event["step"], event["kind"], event["text"].partition(":")[0]) for event in read_lines(run_dir / EVENTS)]


def test_first_reward_error_is_on_console_in_events_report_and_dump(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = reward(tmp_path, "    if extra_info['index'] % 3 == 0:\n        return int('seven')\n    return 1.0")
    run_dir, dump = tmp_path / "run", tmp_path / "dump"
    steps = run_ppo(task, run_dir, own, f"trainer.rollout_data_dir={dump}")
    cause = "ValueError: invalid literal for int() with base 10: 'seven' (mine.py:3)"
    (first, *alarms) = read_lines(run_dir / EVENTS)
    assert first["kind"] == "reward" and first["text"].endswith(f" of 32 rewards of training failed: {cause}")
    assert [event["text"].partition(":")[0] for event in alarms] == ["failed_rewards"]
    assert cause in capfd.readouterr().err and cause.replace("'", "&#39;") in (run_dir / REPORT).read_text()
    for step in steps:
        rows = pq.read_table(dump / f"step_{step['training/global_step']:.0f}.parquet").to_pydict()
        failed = sum(rows["reward_failed"])
        assert len(rows["uid"]) == 32 and failed == step["reward/failed"] == 32 * step["reward/failed_share"] > 0
        assert Counter(rows["reward_error"]) == {cause: failed, None: 32 - failed}
        assert [error is None for error in rows["reward_error"]] == [score is not None for score in rows["score"]]


def test_validation_response_without_a_score_is_reported_not_zero(task: Path, tmp_path: Path) -> None:
    own = reward(tmp_path, "    if extra_info['index'] % 2:\n        raise KeyError('no')\n    return 1.0")
    run_ppo(task, tmp_path / "run", own, "trainer.val_only=true", "trainer.log_val_generations=2")
    assert reported(tmp_path / "run") == [(0, "reward", "16 of 32 rewards of validation failed")]
    errors = [sample["reward_error"] for sample in read_lines(tmp_path / "run" / "samples.jsonl")]
    assert Counter(errors) == {None: 16, "KeyError: 'no' (mine.py:3)": 16}
    assert "no score: KeyError" in (tmp_path / "run" / REPORT).read_text()


def test_healthy_run_reports_nothing(task: Path, tmp_path: Path) -> None:
    steps = run_ppo(task, tmp_path / "run", *TEN, "data.max_response_length=32", "trainer.test_freq=5")
    assert not (tmp_path / "run" / EVENTS).exists() and "val/accuracy" in steps[-1]


def test_responses_that_cannot_terminate_are_reported_before_the_first_step(task: Path, tmp_path: Path) -> None:
    model = f"actor_rollout_ref.model.path={without_eos(task / 'base', tmp_path / 'endless')}"
    run_ppo(task, tmp_path / "run", model)
    assert reported(tmp_path / "run") == [(0, "alarm", "end_token")]
    stops = ppo_arguments(task, tmp_path / "other", model, "alarms.end_token.action=stop")
    assert main_ppo.PROGRAM(stops) == 3 and metrics_of(tmp_path / "other") == []


def test_policy_that_loses_its_validation_score_is_reported(task: Path, tmp_path: Path) -> None:
    """The reward is for different characters, and the learning rate breaks the policy: it then repeats one character."""
    varied = reward(tmp_path, "    return len(set(solution_str)) / 13")
    sampled = ("actor_rollout_ref.rollout.val_kwargs.do_sample=true", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0")
    validated = ("trainer.val_before_train=true", "trainer.test_freq=5", *sampled)
    run_ppo(task, tmp_path / "run", *TEN, varied, *validated, "actor_rollout_ref.actor.optim.lr=1.0")
    assert [(step, name) for step, _, name in reported(tmp_path / "run") if name == "validation"] == [(5, "validation")]
