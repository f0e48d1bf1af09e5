"""Invariants of the policy losses, on padded random batches in float64."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms import padded

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": CLIP | {"clip_ratio_c": 1.6},
    "gspo": CLIP,
    "cispo": CLIP,
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.3},
    "geo_mean": CLIP,
    "gpg": {},
    "clip_cov": CLIP | {"clip_cov_ratio": 0.4, "clip_cov_lb": -0.1, "clip_cov_ub": 9.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
    "dppo_tv": CLIP | {"clip_ratio_c": 1.8},
    "dppo_kl": CLIP | {"clip_ratio_c": 1.8},
}
ROWWISE = [name for name in LOSSES if name not in {"clip_cov", "kl_cov"}]
every_loss = pytest.mark.parametrize("name", LOSSES)
seeds = st.integers(0, 10**6)
few = settings(max_examples=20)


@dataclass(frozen=True)
class Tokens:
    """All (B, R). Advantages are one number a row; no log-ratio lies within 0.005 of an edge where a loss has a kink."""

    old: Tensor
    log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, chosen: slice | Tensor) -> "Tokens":
        return Tokens(self.old[chosen], self.log_probs[chosen], self.advantages[chosen], self.mask[chosen])


def draw(seed: int, *, full_rows: bool = False) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    n, width = (int(torch.randint(1, 6, (1,), generator=g)) for _ in range(2))
    old = -0.3 - 2 * torch.rand(n, width, generator=g, dtype=torch.float64)
    steps = torch.tensor([-0.7, -0.4, -0.25, -0.12, -0.05, 0.05, 0.12, 0.2, 0.26, 0.55, 0.75])
    log_ratio = steps[torch.randint(0, len(steps), (n, width), generator=g)].double()
    log_ratio += 0.01 * torch.rand(n, width, generator=g, dtype=torch.float64)
    mask = (torch.rand(n, width, generator=g) < 0.7).double()
    if full_rows:
        mask = torch.ones_like(mask)
    mask[0, 0] = 1.0
    advantages = torch.randn(n, 1, generator=g, dtype=torch.float64).expand(n, width).clone()
    return Tokens(old, old + log_ratio, advantages, mask)


def loss_and_gradient(name: str, t: Tokens, mode: str = "token-sum", **options: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    x = t.log_probs.clone().requires_grad_()
    chosen = LOSSES[name] | {key: value for key, value in options.items() if key != "is_weights_BR"}
    weights = options.get("is_weights_BR")
    loss, metrics = padded.policy_loss(name, t.old, x, t.advantages, t.mask, mode, is_weights_BR=weights, seed=3, **chosen)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad, metrics


def equal(left: Any, right: Any, tolerance: float = 1e-9) -> None:
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (left, right))
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


def numeric_gradient(name: str, t: Tokens, mode: str) -> Tensor:
    """Central differences of the loss's value."""
    out, step = torch.zeros_like(t.log_probs), 1e-5
    for i in range(out.numel()):
        sides = []
        for sign in (1, -1):
            moved = t.log_probs.clone()
            moved.view(-1)[i] += sign * step
            sides.append(padded.policy_loss(name, t.old, moved, t.advantages, t.mask, mode, seed=3, **LOSSES[name])[0])
        out.view(-1)[i] = (sides[0] - sides[1]) / (2 * step)
    return out


@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg", "geo_mean", "gspo"])
@settings(max_examples=8)
@given(seeds)
def test_gradient_is_the_derivative_of_the_value(name: str, seed: int) -> None:
    """GSPO's and GMPO's values are those of a whole row, so under the mode that takes each row's mean."""
    mode = "seq-mean-token-mean" if name in {"geo_mean", "gspo"} else MODES[seed % len(MODES)]
    t = draw(seed)
    equal(loss_and_gradient(name, t, mode)[1], numeric_gradient(name, t, mode), 1e-6)


@few
@given(seeds)
def test_gradients_where_the_ratio_is_a_constant(seed: int) -> None:
    """CISPO: -A clip(r). DPPO: -A min(r, c) inside the trust region. Both times the gradient of log pi, which is 1."""
    t = draw(seed)
    ratio, gap = (t.log_probs - t.old).exp(), t.log_probs.exp() - t.old.exp()
    equal(loss_and_gradient("cispo", t)[1], -t.advantages * ratio.clamp(0.8, 1.28) * t.mask)
    p, q = t.log_probs.exp(), t.old.exp()
    divergence = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    for name, away in [("dppo_tv", gap.abs()), ("dppo_kl", divergence)]:
        for low, high in [(0.2, 0.28), (0.002, 0.004), (0.03, 0.01)]:
            leaves = torch.where(t.advantages > 0, (gap > 0) & (away > high), (gap < 0) & (away > low))
            expected = -t.advantages * ratio.clamp(max=1.8) * ~leaves * t.mask
            equal(loss_and_gradient(name, t, clip_ratio_low=low, clip_ratio_high=high)[1], expected)


@few
@given(seeds)
def test_gradient_is_zero_exactly_where_the_loss_is_clipped(seed: int) -> None:
    t = draw(seed)
    ratio, positive, marked = (t.log_probs - t.old).exp(), t.advantages > 0, t.mask > 0
    _, gradient, metrics = loss_and_gradient("vanilla", t)
    up, down, dual = positive & (ratio > 1.28), ~positive & (ratio < 0.8), ~positive & (ratio > 1.6)
    assert torch.equal(gradient == 0, up | down | dual | ~marked)
    equal(metrics["actor/pg_clipfrac"], (up | down)[marked].double().mean(), 1e-6)
    equal(metrics["actor/pg_clipfrac_lower"], dual[marked].double().mean(), 1e-6)

    count = t.mask.sum(1, keepdim=True).clamp(min=1)
    row_ratio = (((t.log_probs - t.old) * t.mask).sum(1, keepdim=True) / count).exp()
    clipped = torch.where(positive, row_ratio > 1.28, row_ratio < 0.8)
    assert torch.equal(loss_and_gradient("gspo", t)[1] == 0, clipped | ~marked)

    for name in ("cispo", "sapo", "gpg"):  # these clip a factor or nothing: every token keeps a gradient
        assert torch.equal(loss_and_gradient(name, t)[1] == 0, ~marked), name


@few
@given(seeds, st.floats(-3, 3))
def test_dual_clip_bounds_the_loss_of_negative_advantages(seed: int, log_ratio: float) -> None:
    t = draw(seed)
    t = replace(t, log_probs=t.old + log_ratio, advantages=-t.advantages.abs())
    for row in range(len(t.mask)):
        loss, _, _ = loss_and_gradient("vanilla", t.rows(slice(row, row + 1)))
        assert float(loss) <= float((t.advantages[row].abs() * 1.6 * t.mask[row]).sum()) + 1e-12


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip_cov"])
@few
@given(seeds, st.sampled_from(MODES))
def test_on_policy_every_loss_is_the_policy_gradient(name: str, seed: int, mode: str) -> None:
    t = draw(seed)
    t = replace(t, log_probs=t.old)
    weights = torch.ones_like(t.mask).requires_grad_()
    padded.aggregate(weights, t.mask, mode).backward()
    assert weights.grad is not None
    expected = -t.advantages * weights.grad
    if name == "geo_mean":  # a row's loss is that of its geometric mean: each token has the row's mean weight
        shares = weights.grad.sum(1, keepdim=True) / t.mask.sum(1, keepdim=True).clamp(min=1)
        expected = -t.advantages * shares * t.mask
    _, gradient, metrics = loss_and_gradient(name, t, mode)
    equal(gradient, expected, 1e-7)
    for share in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
        assert abs(float(metrics.get(share, 0.0))) < 1e-12


@every_loss
@few
@given(seeds, st.sampled_from(MODES))
def test_every_loss_obeys_every_aggregation_mode(name: str, seed: int, mode: str) -> None:
    """A token's gradient under a mode is that under token-sum, times the token's weight in the mode."""
    t = draw(seed)
    weights = torch.ones_like(t.mask).requires_grad_()
    padded.aggregate(weights, t.mask, mode).backward()
    assert weights.grad is not None
    equal(loss_and_gradient(name, t, mode)[1], loss_and_gradient(name, t)[1] * weights.grad, 1e-8)


@pytest.mark.parametrize("name", ROWWISE)
@settings(max_examples=10)
@given(seeds)
def test_losses_of_two_parts_sum_to_the_loss_of_the_batch(name: str, seed: int) -> None:
    t = draw(seed)
    parts = [t.rows(slice(0, 1)), t.rows(slice(1, None))]
    if len(t.mask) == 1:
        return
    for mode in MODES:
        size = {"token-mean": lambda p: float(p.mask.sum()), "token-sum": lambda p: 1.0}.get(
            mode, lambda p: float((p.mask.sum(1) > 0).sum())
        )
        found = [(size(part), *loss_and_gradient(name, part, mode)[:2]) for part in parts if part.mask.any()]
        total = 1.0 if mode == "token-sum" else sum(n for n, _, _ in found)
        loss, gradient, _ = loss_and_gradient(name, t, mode)
        equal(loss, sum(n * part for n, part, _ in found) / total, 1e-8)
        if len(found) == 2:
            equal(gradient, torch.cat([n * part for n, _, part in found]) / total, 1e-8)


@every_loss
@few
@given(seeds, st.floats(0.05, 4))
def test_importance_weights_scale_the_loss(name: str, seed: int, weight: float) -> None:
    t = draw(seed)
    loss, gradient, _ = loss_and_gradient(name, t)
    weighted, its_gradient, _ = loss_and_gradient(name, t, is_weights_BR=torch.full_like(t.mask, weight))
    equal(weighted, loss * weight, 1e-6)
    equal(its_gradient, gradient * weight, 1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "geo_mean"])
@few
@given(seeds)
def test_importance_weights_apply_per_token(name: str, seed: int) -> None:
    t = draw(seed)
    weights = torch.rand(t.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    equal(loss_and_gradient(name, t, is_weights_BR=weights)[1], loss_and_gradient(name, t)[1] * weights)


@every_loss
@few
@given(seeds, st.sampled_from([40.0, -40.0, 0.0]))
def test_values_outside_the_mask_change_nothing(name: str, seed: int, junk: float) -> None:
    t = draw(seed)
    marked = t.mask > 0
    other = replace(
        t, old=torch.where(marked, t.old, junk), log_probs=torch.where(marked, t.log_probs, -junk),
        advantages=torch.where(marked, t.advantages, junk),
    )  # fmt: skip
    loss, gradient, metrics = loss_and_gradient(name, t, "seq-mean-token-mean")
    its_loss, its_gradient, its_metrics = loss_and_gradient(name, other, "seq-mean-token-mean")
    equal(its_loss, loss)
    equal(its_gradient, gradient)
    for key in metrics:
        equal(float(its_metrics[key]), float(metrics[key]))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip_cov"])  # it samples by token order
@few
@given(seeds)
def test_rows_in_another_order_have_the_same_loss(name: str, seed: int) -> None:
    t = draw(seed)
    order = torch.randperm(len(t.mask), generator=torch.Generator().manual_seed(seed))
    equal(loss_and_gradient(name, t.rows(order))[1], loss_and_gradient(name, t)[1][order])


@every_loss
@few
@given(seeds)
def test_zero_advantage_has_zero_gradient(name: str, seed: int) -> None:
    if name == "kl_cov":  # its penalty does not depend on the advantage
        return
    t = draw(seed)
    assert not loss_and_gradient(name, replace(t, advantages=torch.zeros_like(t.advantages)))[1].any()


@few
@given(seeds)
def test_clip_cov_excludes_the_configured_number_of_tokens(seed: int) -> None:
    t = draw(seed)
    marked = t.mask > 0
    plain = loss_and_gradient("vanilla", t, clip_ratio_c=1e9)[1]
    a, x = (values - values[marked].mean() for values in (t.advantages, t.log_probs))
    candidates = (a * x > -0.1) & (a * x < 9.0) & marked & (plain != 0)
    for ratio in (0.0002, 0.4, 1.0):
        gradient = loss_and_gradient("clip_cov", t, clip_cov_ratio=ratio)[1]
        left_out = (gradient == 0) & (plain != 0)
        assert not (left_out & ~candidates).any()
        assert int(left_out.sum()) == min(max(int(ratio * int(marked.sum())), 1), int(candidates.sum()))
        equal(gradient[~left_out], plain[~left_out])


@few
@given(seeds)
def test_kl_cov_penalises_the_tokens_of_greatest_covariance(seed: int) -> None:
    t = draw(seed)
    marked = t.mask > 0
    ratio = (t.log_probs - t.old).exp()
    a, x = (values - values[marked].mean() for values in (t.advantages, t.log_probs))
    covariance = torch.where(marked, a * x, -torch.inf)
    chosen = covariance >= covariance.flatten().sort(descending=True).values[max(int(0.3 * int(marked.sum())), 1) - 1]
    if int(chosen.sum()) != max(int(0.3 * int(marked.sum())), 1):
        return  # a tie: either may be chosen
    expected = (-t.advantages * ratio + 0.7 * (t.log_probs - t.old).sign() * chosen) * t.mask
    equal(loss_and_gradient("kl_cov", t)[1], expected)


def test_gspo_caps_the_ratio_of_a_row() -> None:
    """At e^10, and beyond there is no gradient: A < 0, so that no clip comes before."""
    old = torch.full((2, 3), -20.0, dtype=torch.float64)
    t = Tokens(old, old + torch.tensor([[9.0], [11.0]]), -torch.ones_like(old), torch.ones_like(old))
    loss, gradient, _ = loss_and_gradient("gspo", t)
    equal(loss, 3 * (torch.tensor(9.0).double().exp() + torch.tensor(10.0).double().exp()))
    equal(gradient, torch.tensor([[9.0], [-torch.inf]]).double().exp().expand(2, 3))
