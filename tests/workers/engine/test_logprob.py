"""The chunked head against the plain formula."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.memory import Alive
from workers.engine import logprob
from workers.engine.logprob import (
    VocabShard,
    backward_chunk_size,
    chunk_size,
    head_all_log_probs,
    head_entropy,
    head_log_probs,
    head_sum_pi_squared,
    head_top_log_probs,
)


def inputs(n: int, vocabulary: int, hidden: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    states = torch.randn(n, hidden, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocabulary, hidden, generator=draw, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (n,), generator=draw)
    return *(x.to(dtype).requires_grad_() for x in (states, weight, bias)), targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_equals_log_softmax(chunk: int, with_bias: bool, temperature: float) -> None:
    hidden, weight, bias, targets = inputs(7, 13, 5)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    arguments = (hidden, weight, bias if with_bias else None, targets)
    actual = head_log_probs(*arguments, temperature=temperature, want_entropy=True, chunk=chunk)
    reference = plain(*arguments, temperature)
    direction = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    for our, their in zip(actual, reference, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((lp * direction).sum() + (h * direction.flip(0)).sum(), leaves) for lp, h in (actual, reference)]
    for our, their in zip(*grads, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_head_is_equal(temperature: float, want_entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as for a GPU, and run by torch's own kernels; chunks of 4 and 3 positions share their graphs."""
    logprob._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    hidden, weight, bias, targets = inputs(7, 13, 5)
    direction = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    found = []
    for fused in (False, True):
        counters.clear()
        log_probs, entropy = head_log_probs(
            hidden, weight, bias, targets, temperature=temperature, want_entropy=want_entropy, chunk=4, fused=fused
        )
        total = (log_probs * direction).sum() + (0 if entropy is None else (entropy * direction.flip(0)).sum())
        found.append([log_probs, *torch.autograd.grad(total, (hidden, weight, bias)), *([] if entropy is None else [entropy])])
    assert counters["stats"]["unique_graphs"] == 2
    for our, their in zip(*found, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
    logprob._compiled.cache_clear()


@pytest.mark.parametrize("want_entropy", [False, True])
def test_gradcheck(want_entropy: bool) -> None:
    hidden, weight, bias, targets = inputs(5, 6, 3)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        found = head_log_probs(*leaves, targets, temperature=0.8, want_entropy=want_entropy, chunk=2)
        return tuple(out for out in found if out is not None)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("with_bias", [False, True])
def test_whole_distributions_and_the_sum_of_their_squares(with_bias: bool) -> None:
    hidden, weight, bias, _ = inputs(7, 13, 5)
    bias = bias if with_bias else None
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    expected = (logits / 0.6).log_softmax(-1)
    found = head_all_log_probs(hidden, weight, bias, temperature=0.6)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    squares = head_sum_pi_squared(hidden, weight, bias, temperature=0.6)
    torch.testing.assert_close(squares, expected.detach().exp().square().sum(-1), rtol=1e-12, atol=1e-12)
    top = head_top_log_probs(hidden, weight, bias, temperature=0.6)
    torch.testing.assert_close(top, expected.detach().sort(descending=True).values[:, :2], rtol=1e-12, atol=1e-12)
    assert found.requires_grad and not squares.requires_grad and not top.requires_grad
    assert head_sum_pi_squared(hidden[:0], weight, bias, temperature=0.6).shape == (0,)


@pytest.mark.parametrize("with_bias", [False, True])
def test_entropy_of_some_positions_is_that_of_all_where_it_is_asked_for(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = inputs(7, 13, 5)
    bias = bias if with_bias else None
    monkeypatch.setattr(logprob, "chunk_size", lambda vocabulary: 2)
    at = torch.tensor([True, False, True, True, False, False, True])
    _, expected = plain(hidden, weight, bias, targets, 0.6)
    found = head_entropy(hidden, weight, bias, at.nonzero()[:, 0], temperature=0.6)
    torch.testing.assert_close(found, torch.where(at, expected.detach(), 0.0), rtol=1e-12, atol=1e-12)
    nowhere = torch.zeros(0, dtype=torch.int64)
    assert not found.requires_grad and not head_entropy(hidden, weight, bias, nowhere, temperature=0.6).any()


def test_no_positions_still_give_gradients() -> None:
    """A rank whose rows are all masked must take part in the reduction: zeros, not None."""
    hidden, weight, bias, targets = inputs(0, 6, 3)
    log_probs, entropy = head_log_probs(hidden, weight, bias, targets, temperature=1.0, want_entropy=True)
    assert entropy is not None and log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()
    assert hidden.grad is not None


def test_no_positions_on_a_cut_head(group: None) -> None:
    """A micro-batch in which nothing is trained, where every rank has a part of the vocabulary."""
    hidden, weight, _, targets = inputs(7, 13, 5)
    world = dist.group.WORLD
    assert world is not None
    shard = VocabShard(world, 0, 13)
    log_probs, entropy = head_log_probs(hidden[:0], weight, None, targets[:0], temperature=0.6, want_entropy=True, shard=shard)
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()
    assert head_sum_pi_squared(hidden[:0], weight, None, temperature=0.6, shard=shard).shape == (0,)
    assert head_top_log_probs(hidden[:0], weight, None, temperature=0.6, shard=shard).shape == (0, 2)
    nowhere = torch.zeros(0, dtype=torch.int64)
    assert not head_entropy(hidden, weight, None, nowhere, temperature=0.6, shard=shard).any()


def test_entropy_is_left_out_unless_wanted() -> None:
    hidden, weight, _, targets = inputs(4, 6, 3)
    assert head_log_probs(hidden, weight, None, targets, temperature=1.0, want_entropy=False)[1] is None


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets = inputs(4, 6, 3)
    weight.requires_grad_(False)
    log_probs, _ = head_log_probs(hidden, weight, None, targets, temperature=1.0, want_entropy=False)
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_bfloat16_is_summed_in_float32() -> None:
    """4096 positions in bfloat16: a running sum of dW in bfloat16 would be off by far more than one rounding."""
    hidden, weight, _, targets = inputs(4096, 11, 8, torch.bfloat16)
    log_probs, _ = head_log_probs(hidden, weight, None, targets, temperature=1.0, want_entropy=False, chunk=16)
    assert log_probs.dtype == torch.float32
    log_probs.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    plain(*exact, None, targets, 1.0)[0].sum().backward()
    error = (weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()
    assert error < 0.01
    assert weight.grad.dtype == torch.bfloat16


def test_the_gradient_of_a_bfloat16_head_is_as_exact_as_the_plain_way() -> None:
    """One product over all positions rounds dW once, and so do many chunks: their products are not rounded one by one."""
    hidden, weight, _, targets = inputs(4096, 200, 64, torch.bfloat16)
    signs = torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def gradient(dtype: torch.dtype, chunk: int | None) -> Tensor:
        states, head = (x.detach().clone().to(dtype).requires_grad_() for x in (hidden, weight / 8))
        if chunk is None:
            log_probs = (states @ head.T).to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
            log_probs = log_probs.gather(1, targets[:, None])[:, 0]
        else:
            log_probs, _ = head_log_probs(states, head, None, targets, temperature=1.0, want_entropy=False, chunk=chunk)
        (log_probs * signs).sum().backward()
        assert head.grad is not None
        return head.grad.double()

    exact = gradient(torch.float64, None)
    plainly, by_chunks = ((gradient(torch.bfloat16, chunk) - exact).abs().mean() for chunk in (None, 32))
    assert by_chunks < 1.02 * plainly


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("want_entropy", [False, True])
def test_never_holds_all_logits(want_entropy: bool) -> None:
    n, vocabulary = 4096, 300
    hidden, weight, _, targets = inputs(n, vocabulary, 8, torch.float32)
    with Largest() as seen:
        log_probs, entropy = head_log_probs(hidden, weight, None, targets, temperature=1.0, want_entropy=want_entropy)
        (log_probs.sum() if entropy is None else log_probs.sum() + entropy.sum()).backward()
    assert seen.elements == chunk_size(vocabulary) * vocabulary < n * vocabulary / 4


def test_large_vocabularies_get_smaller_chunks() -> None:
    assert (chunk_size(460), chunk_size(152_000)) == (512, 256)
    of_backward = [backward_chunk_size(152_000, hidden) for hidden in (64, 896, 3584, 8192)]
    assert of_backward == [256, 512, 2048, 2048] and backward_chunk_size(460, 4096) == 512


def test_the_gradient_of_the_weight_is_summed_where_it_lies() -> None:
    """In the weight's own dtype there is one of its size, in addition to chunks, which are small here."""
    hidden, weight, _, targets = inputs(64, 100, 500, torch.float32)
    log_probs, _ = head_log_probs(hidden, weight, None, targets, temperature=1.0, want_entropy=False, chunk=2)
    with Alive([hidden, weight]) as alive:
        log_probs.sum().backward()
    assert alive.most < hidden.nbytes + weight.nbytes + hidden.nbytes + 1.2 * weight.nbytes
