"""Invariants of the value loss, on padded random batches in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms import padded

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
every_mode = pytest.mark.parametrize("mode", MODES)
seeds = st.integers(0, 10**6)
few = settings(max_examples=25)


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """vpreds, values, returns and mask: (B, R)."""
    g = torch.Generator().manual_seed(seed)
    n, width = (int(torch.randint(1, 7, (1,), generator=g)) for _ in range(2))
    mask = (torch.rand(n, width, generator=g) < 0.6).double()
    mask[0, -1] = 1.0
    vpreds, values, returns = torch.randn(3, n, width, generator=g, dtype=torch.float64).unbind()
    return vpreds.requires_grad_(), values, returns, mask


@every_mode
@few
@given(seeds, st.floats(0.05, 3))
def test_value_and_gradient_by_definition(mode: str, seed: int, cliprange: float) -> None:
    """max of the plain and of the clipped square, halved; where the clipped one wins outside the range, no gradient."""
    vpreds, values, returns, mask = draw(seed)
    loss, fraction = padded.value_loss(vpreds, values, returns, mask, mode, cliprange_value=cliprange)
    loss.backward()
    assert vpreds.grad is not None
    v = vpreds.detach()
    clipped = torch.maximum(torch.minimum(v, values + cliprange), values - cliprange)
    plain, bound = (v - returns).square(), (clipped - returns).square()
    weights = torch.ones_like(mask).requires_grad_()
    padded.aggregate(weights, mask, mode).backward()
    assert weights.grad is not None
    torch.testing.assert_close(loss.detach(), (torch.maximum(plain, bound) / 2 * weights.grad).sum(), atol=1e-9, rtol=1e-9)
    wins = bound > plain
    torch.testing.assert_close(vpreds.grad, torch.where(wins, 0.0, v - returns) * weights.grad, atol=1e-9, rtol=1e-9)
    assert abs(float(fraction) - float(wins[mask > 0].double().mean())) < 1e-7


@few
@given(seeds)
def test_clipped_loss_is_never_below_the_plain_one(seed: int) -> None:
    vpreds, values, returns, mask = draw(seed)
    found = [
        float(padded.value_loss(vpreds.detach(), values, returns, mask, "token-mean", cliprange_value=c)[0])
        for c in (0.1, 0.5, 1e9)
    ]  # fmt: skip
    squares = (vpreds.detach() - returns).square()[mask > 0].mean() / 2
    assert min(found) >= float(squares) - 1e-9
    assert abs(found[2] - float(squares)) < 1e-9
