"""Invariants of the aggregation modes, on padded random batches in float64."""

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


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Losses and a mask with holes, empty rows among them: (B, R)."""
    g = torch.Generator().manual_seed(seed)
    n, width = (int(torch.randint(1, 7, (1,), generator=g)) for _ in range(2))
    mask = (torch.rand(n, width, generator=g) < 0.6).double()
    mask[0, -1] = 1.0
    return torch.randn(n, width, generator=g, dtype=torch.float64), mask


def equal(left: Tensor | float, right: Tensor | float) -> None:
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (left, right))
    torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-9)


@few
@given(seeds)
def test_weights_sum_to_the_expected_total(seed: int) -> None:
    loss, mask = draw(seed)
    ones, tokens, rows = torch.ones_like(loss), float(mask.sum()), float((mask.sum(1) > 0).sum())
    for mode, total in [
        ("token-mean", 1.0),
        ("token-sum", tokens),
        ("seq-mean-token-sum", tokens / rows),
        ("seq-mean-token-mean", 1.0),
    ]:
        equal(padded.aggregate(ones, mask, mode), total)
    equal(padded.aggregate(ones, mask, "seq-mean-token-sum-norm"), tokens / rows / loss.shape[1])
    equal(padded.aggregate(ones, mask, "seq-mean-token-sum-norm", norm_length=100), tokens / rows / 100)


@every_mode
@few
@given(seeds)
def test_means_match_their_definition(mode: str, seed: int) -> None:
    loss, mask = draw(seed)
    rows = [[float(x) for x, m in zip(*row, strict=True) if m] for row in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    flat = [x for row in rows for x in row]
    meant = {
        "token-mean": sum(flat) / len(flat),
        "token-sum": sum(flat),
        "seq-mean-token-sum": sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(sum(row) for row in rows) / len(rows) / loss.shape[1],
    }
    equal(padded.aggregate(loss, mask, mode), meant[mode])


@every_mode
@few
@given(seeds, st.sampled_from([1e3, -1e3]))
def test_empty_rows_padding_order_and_masked_values_change_nothing(mode: str, seed: int, junk: float) -> None:
    loss, mask = draw(seed)
    n, width = loss.shape
    order = torch.randperm(n + 1, generator=torch.Generator().manual_seed(seed))
    wide = torch.full((n + 1, width + 2), junk, dtype=torch.float64)
    wide[:n, :width] = torch.where(mask > 0, loss, junk)
    wide_mask = torch.zeros_like(wide)
    wide_mask[:n, :width] = mask
    found = padded.aggregate(wide[order], wide_mask[order], mode, norm_length=width)
    equal(found, padded.aggregate(loss, mask, mode))


@every_mode
@few
@given(seeds)
def test_weighted_halves_equal_the_batch(mode: str, seed: int) -> None:
    loss, mask = draw(seed)
    other, its_mask = draw(seed + 1)
    width = max(loss.shape[1], other.shape[1])
    pad = lambda x: torch.nn.functional.pad(x, (0, width - x.shape[1]))  # noqa: E731
    loss, mask, other, its_mask = pad(loss), pad(mask), pad(other), pad(its_mask)

    def counted(m: Tensor) -> float:
        return 1.0 if mode == "token-sum" else float(m.sum()) if mode == "token-mean" else float((m.sum(1) > 0).sum())

    whole, whole_mask = torch.cat([loss, other]), torch.cat([mask, its_mask])
    parts = padded.aggregate(loss, mask, mode) * counted(mask) + padded.aggregate(other, its_mask, mode) * counted(its_mask)
    equal(padded.aggregate(whole, whole_mask, mode) * (1.0 if mode == "token-sum" else counted(whole_mask)), parts)


@every_mode
def test_batch_without_a_trained_token_has_zero_weights(mode: str) -> None:
    loss = torch.randn(2, 3, requires_grad=True)
    total = padded.aggregate(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert float(total.detach()) == 0.0 and loss.grad is not None and not loss.grad.any()
