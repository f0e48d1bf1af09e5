from pathlib import Path

import pytest

from examples.reward_length import compute_score
from tests.layout.source import ROOT
from tests.runs import make_task, run_ppo


def test_score_is_highest_at_the_target_length() -> None:
    scores = [compute_score("", "x" * length, "", {}, target=4)["score"] for length in range(10)]
    assert scores == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.soak
def test_a_model_learns_the_length(tmp_path: Path) -> None:
    """From random weights: the commands of docs/how_to/reward.md at small scale."""
    task = make_task(tmp_path)
    path = f"reward.custom_reward_function.path={ROOT}/examples/reward_length.py"
    sizes = ("actor_rollout_ref.rollout.n=8", "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    lr = "actor_rollout_ref.actor.optim.lr=1e-3"
    steps = run_ppo(task, tmp_path / "run", path, *sizes, lr, "trainer.total_training_steps=40")
    score = [step["critic/score/mean"] for step in steps]
    assert sum(score[-5:]) / 5 > sum(score[:5]) / 5 + 0.1
    assert all(step["reward/characters/mean"] > 0 for step in steps)
