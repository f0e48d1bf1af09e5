from dataclasses import dataclass
from pathlib import Path

import torch

from examples.my_loss import near_only
from tests.layout.source import ROOT
from tests.runs import make_task, run_ppo
from trainer.algorithms.policy_losses import PolicyLossInputs


@dataclass
class Clip:
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.3


def test_tokens_that_moved_too_far_have_no_gradient() -> None:
    ratios = torch.tensor([1.0, 0.85, 0.75, 1.25, 1.35])
    log_probs = ratios.log().requires_grad_()
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(5),
        advantages=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        response_mask=torch.ones(5),
        lengths=torch.tensor([2, 3]),
    )
    loss, metrics = near_only(inputs, Clip())
    loss.sum().backward()
    assert log_probs.grad.tolist() == [-1.0, -2.0, 0.0, -4.0, 0.0]
    assert metrics["actor/near"].value == 0.6


def test_a_run_takes_it_from_the_file(tmp_path: Path) -> None:
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={ROOT}/examples/my_loss.py:near_only"
    steps = run_ppo(make_task(tmp_path), tmp_path / "run", loss, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert all(0 < step["actor/near"] <= 1 and step["actor/grad_norm"] > 0 for step in steps)
