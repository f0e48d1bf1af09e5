"""Complete runs with partial rollouts on the quick start's task; the embedded engine, a tick of four steps."""

from pathlib import Path

import pytest

import trainer.rollout.remote_rollout as remote_rollout
from tests.runs import make_task, repeatable, run_ppo

PARTIAL = (
    "algorithm=grpo", "async_training.mode=partial", "algorithm.rollout_correction.rollout_is=token", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "data.max_response_length=24",
    "trainer.total_training_steps=5", "trainer.save_freq=1", "async_training.max_age=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=16, sft_size=8)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


def test_run_with_responses_in_flight_resumes_bitwise(task: Path, tmp_path: Path) -> None:
    def dumps(name: str) -> tuple[str, ...]:
        return (*PARTIAL, f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *dumps("whole"))
    assert any(step["rollout/stale_tokens"] > 0 for step in whole[1:]) and whole[0]["rollout/stale_tokens"] == 0
    assert max(step["rollout/age/max"] for step in whole) >= 1
    run_ppo(task, tmp_path / "broken", *dumps("broken"), "trainer.total_training_steps=2")
    assert repeatable(run_ppo(task, tmp_path / "broken", *dumps("broken"))) == repeatable(whole)
