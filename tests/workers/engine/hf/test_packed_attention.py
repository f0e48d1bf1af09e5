"""Packed attention against the plain formula, row by row."""

import pytest
import torch
from torch import Tensor

from workers.determinism import deterministic_kernels
from workers.engine.hf.packed_attention import PackedRows, packed_attention, varlen

LENGTHS = [[5, 5, 5], [7, 3, 3, 1], [1, 9, 2, 9, 1], [1]]
MODULE = torch.nn.Module()


def states(total: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """4 query heads over 2 kv heads of size 8, laid out as transformers hands them over."""
    draw = torch.Generator().manual_seed(total)
    return tuple(
        torch.randn(1, total, heads, 8, generator=draw, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
    )


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    out = []
    for row_q, row_k, row_v in zip(*(x[0].split(lengths, dim=1) for x in (q, k, v)), strict=True):
        length = row_q.shape[1]
        scores = 0.3 * row_q @ row_k.repeat_interleave(2, 0).transpose(1, 2)
        behind = torch.arange(length)[:, None] - torch.arange(length)
        seen = (behind >= 0) & (behind < (window or length))
        out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ row_v.repeat_interleave(2, 0))
    return torch.cat(out, dim=1).transpose(0, 1)[None]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_the_plain_formula_row_by_row(lengths: list[int], window: int | None) -> None:
    q, k, v = states(sum(lengths))
    rows = PackedRows.of(lengths, q.device)
    actual, _ = packed_attention(MODULE, q, k, v, None, packed_rows=rows, scaling=0.3, sliding_window=window)
    expected = plain(q, k, v, lengths, window)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=actual.dtype)
    grads = [torch.autograd.grad((out * direction).sum(), (q, k, v)) for out in (actual, expected)]
    for actual_d, expected_d in zip(*grads, strict=True):
        torch.testing.assert_close(actual_d, expected_d, rtol=1e-10, atol=1e-12)


def test_rows_equally_long_are_one_call() -> None:
    rows = PackedRows.of([7, 7, 7, 3, 3, 1], torch.device("cpu"))
    assert rows.blocks == ((3, 7, 7), (2, 3, 3), (1, 1, 1))
    starts, longest = rows.queries
    assert starts.tolist() == rows.keys[0].tolist() == [0, 7, 14, 21, 24, 27, 28]
    assert starts.dtype == torch.int32
    assert longest == rows.keys[1] == 7
    assert rows.last.tolist() == [6, 13, 20, 23, 26, 27]


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"attention_mask": torch.ones(1, 1, 6, 6)}])
def test_what_it_cannot_do_is_refused(extra: dict[str, object]) -> None:
    q, k, v = states(6)
    with pytest.raises(ValueError, match="supports no masks, score caps or sinks"):
        packed_attention(MODULE, q, k, v, extra.pop("attention_mask", None), packed_rows=PackedRows.of([6], q.device), **extra)


class Kernel(torch.autograd.Function):
    """In the place of FlashAttention: its backward notes whether torch would refuse a kernel that does not repeat itself."""

    strict: list[bool]

    @staticmethod
    def forward(ctx: object, q: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        asked = torch.are_deterministic_algorithms_enabled()
        Kernel.strict.append(asked and not torch.is_deterministic_algorithms_warn_only_enabled())
        return grad


def test_the_kernel_of_a_gpu_repeats_itself_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.hf.packed_attention.varlen_attn", lambda q, *args, enable_gqa, **kwargs: Kernel.apply(q))
    Kernel.strict = []
    q, k, v = (x[0].transpose(0, 1) for x in states(6))
    rows = PackedRows.of([6], q.device)
    places = rows.queries
    varlen(q, k, v, places, places).sum().backward()
    with deterministic_kernels():
        varlen(q, k, v, places, places).sum().backward()
    assert Kernel.strict == [False, True]
