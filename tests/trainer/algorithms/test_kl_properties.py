"""Expectations of the KL estimators and their gradients, enumerated over a small vocabulary in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms import padded

KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
seeds = st.integers(0, 10**6)
few = settings(max_examples=25)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a policy and of a reference over five tokens."""
    g = torch.Generator().manual_seed(seed)
    logits, ref = 2 * torch.rand(2, 5, generator=g, dtype=torch.float64)  # so that k3 stays below its bound
    return logits, ref.log_softmax(0)


def divergence(logits: Tensor, ref: Tensor) -> Tensor:
    log_probs = logits.log_softmax(0)
    return (log_probs.exp() * (log_probs - ref)).sum()


def expected_value(kind: str, logits: Tensor, ref: Tensor) -> Tensor:
    log_probs = logits.log_softmax(0)
    return (log_probs.exp() * padded.kl(kind, log_probs[None], ref[None])[0]).sum()


def expected_gradient(kind: str, logits: Tensor, ref: Tensor) -> Tensor:
    """Mean over the policy's own tokens of the gradient of each token's estimate; the sampling itself has none."""
    x = logits.clone().requires_grad_()
    log_probs = x.log_softmax(0)
    (log_probs.exp().detach() * padded.kl(kind, log_probs[None], ref[None])[0]).sum().backward()
    assert x.grad is not None
    return x.grad


def equal(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-9)


@few
@given(seeds)
def test_k1_and_k3_have_the_divergence_as_their_mean(seed: int) -> None:
    logits, ref = draw(seed)
    for kind in ("kl", "k1", "low_var_kl", "k3", "kl+", "k1+", "low_var_kl+", "k3+"):
        equal(expected_value(kind, logits, ref), divergence(logits, ref))


@few
@given(seeds)
def test_k2_and_every_plus_have_the_divergences_gradient(seed: int) -> None:
    logits, ref = draw(seed)
    x = logits.clone().requires_grad_()
    divergence(x, ref).backward()
    assert x.grad is not None
    for kind in ("mse", "k2", *(f"{kind}+" for kind in KINDS)):
        equal(expected_gradient(kind, logits, ref), x.grad)
    equal(expected_gradient("k1", logits, ref), torch.zeros(5, dtype=torch.float64))  # k1's is zero, hence the `+` kinds


@pytest.mark.parametrize("kind", KINDS)
@few
@given(seeds)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, ref = (-6 * torch.rand(2, 3, 4, generator=g, dtype=torch.float64)).unbind()
    x.requires_grad_()
    value = padded.kl(f"{kind}+", x, ref)
    equal(value.detach(), padded.kl(kind, x, ref).detach())
    value.sum().backward()
    assert x.grad is not None
    equal(x.grad, (x - ref).detach())


@few
@given(seeds)
def test_signs_and_symmetry(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, ref = (-9 * torch.rand(2, 3, 4, generator=g, dtype=torch.float64)).unbind()
    for kind in ("abs", "mse", "k2", "low_var_kl", "k3"):
        assert (padded.kl(kind, x, ref) >= 0).all(), kind
    for kind in KINDS:
        assert not padded.kl(kind, x, x).any(), kind
    for kind, sign in [("k1", -1), ("abs", 1), ("k2", 1)]:
        equal(padded.kl(kind, ref, x), sign * padded.kl(kind, x, ref))
    equal(padded.kl("abs", x, ref), padded.kl("k1", x, ref).abs())
    equal(padded.kl("k2", x, ref), padded.kl("k1", x, ref).square() / 2)


def test_k3_stays_finite() -> None:
    """The log-ratio is clamped to 20 and the value to 10; the gradient is 0 beyond either."""
    x = torch.tensor([[-800.0, -25.0, -3.0, -1.0, -0.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-0.0, -0.0, -0.0, -2.0, -300.0]], dtype=torch.float64)
    value = padded.kl("k3", x, ref)
    equal(value.detach()[0], torch.tensor([10.0, 10.0, 10.0, 1 / torch.e, 10.0], dtype=torch.float64))
    value.sum().backward()
    assert x.grad is not None
    equal(x.grad[0], torch.tensor([0.0, 0.0, 0.0, 1 - 1 / torch.e, 0.0], dtype=torch.float64))
