from pathlib import Path

import pytest

from examples.reward_length import compute_score
from tests.layout.source import ROOT
from tests.runs import make_task, run_ppo


def test_the_target_is_worth_most() -> None:
    scores = [compute_score("", "x" * length, "", {}, target=4)["score"] for length in range(10)]
    assert scores == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]


def test_a_model_learns_the_length(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    path = f"reward.custom_reward_function.path={ROOT}/examples/reward_length.py"
    arguments = "reward.custom_reward_function.reward_kwargs={target: 1}"
    steps = run_ppo(task, tmp_path / "run", path, arguments, "trainer.total_training_steps=12")
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"] + 0.2
    assert steps[-1]["reward/characters/mean"] == pytest.approx(steps[-1]["response_length/mean"] - 1, abs=1)
