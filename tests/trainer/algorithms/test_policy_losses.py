from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from configs.schema.ppo import ActorConfig
from tests.trainer.algorithms.plain import defaults, loss_inputs
from trainer.algorithms.policy_losses import vanilla


def config(**changes: object) -> ActorConfig:
    return replace(defaults().actor_rollout_ref.actor, **({"clip_ratio_high": 0.3} | changes))


def token_loss(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its gradient in the log-prob."""
    log_prob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    old = torch.zeros(1, dtype=torch.float64)
    loss, _ = vanilla(loss_inputs(log_prob, old, torch.tensor([advantage], dtype=torch.float64)), config())
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return float(loss.detach()), float(gradient)


@given(st.floats(0.05, 20), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_clipped_tokens_have_zero_gradient(ratio: float, advantage: float) -> None:
    assume(all(abs(ratio - bound) > 1e-9 for bound in (0.8, 1.3, 3.0)))  # at a bound, exp(log(ratio)) may round to its other side
    loss, gradient = token_loss(ratio, advantage)
    held = (advantage > 0 and ratio > 1.3) or (advantage < 0 and (ratio < 0.8 or ratio > 3.0))
    bound = {True: min(max(ratio, 0.0), 1.3), False: max(min(ratio, 3.0), 0.8)}[advantage > 0]
    assert loss == pytest.approx(-advantage * bound, rel=1e-9)
    assert gradient == pytest.approx(0.0 if held else -advantage * ratio, rel=1e-9)
