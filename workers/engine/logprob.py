"""Log-probs and entropy of a language head without ever holding (T, V) in float32.

The head's product is made a chunk of positions at a time and made again in the backward: the same two products as the
plain way plus one, and memory of one chunk instead of all (measured: 605 MB instead of 2978 at V 152k, T 1k, in the
same time).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The head's rows [start, start + rows) are on this rank of ``group``; every rank has the same hidden states.

    What comes out is equal on all ranks; gradients of hidden states are each rank's part, and have to be summed by the caller.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def sum(self, mine: Tensor) -> Tensor:
        dist.all_reduce(mine, group=self.group)
        return mine

    def gather(self, mine: Tensor) -> Tensor:
        """(...) of each rank -> (ranks, ...). Shapes must be equal."""
        whole = mine.new_empty(self.group.size() * mine.numel())
        dist.all_gather_into_tensor(whole, mine.flatten(), group=self.group)
        return whole.view(self.group.size(), *mine.shape)

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this shard for token ids, any where the token is another rank's, and where it is this one's."""
        rows = targets - self.start
        mine = (rows >= 0) & (rows < self.rows)
        return rows.where(mine, 0), mine


def chunk_size(vocabulary: int) -> int:
    """Positions at once: peak memory is about 3 * chunk * V * 4 bytes, and larger gains no time."""
    return 512 if vocabulary <= 32768 else 256


def backward_chunk_size(vocabulary: int, hidden: int) -> int:
    """Each chunk of the backward reads and writes all of the head's gradient, (V, H) in float32. Where V is large: as many
    positions at once as make logits half as large as that or more, but 2048 at most. At 7B that is 7 % of a step on an H200, for
    0.6 GB.
    """
    most = chunk_size(vocabulary)
    return most if vocabulary <= 32768 else max(most, min(2048, 1 << (hidden.bit_length() - 1)))


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    want_entropy: bool,
    chunk: int | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(hidden @ weight.T / temperature) at ``targets``, and the entropy of that distribution, in nats.

    hidden (N, H), weight (V, H), bias (V,), targets int64 (N,) -> log_probs (N,), entropy (N,) or None. The product is
    made in hidden's dtype, everything after it in float32 (float64 for float64). Both results are differentiable once.
    chunk: positions at once, in both directions. shard: weight and bias are these rows of the whole; collective over its group.
    """
    chunks = (chunk, chunk) if chunk is not None else (chunk_size(weight.shape[0]), backward_chunk_size(*weight.shape))
    log_probs, entropy = _HeadLogProbs.apply(hidden, weight, bias, targets, temperature, want_entropy, chunks, shard)
    return log_probs, entropy if want_entropy else None


@torch.no_grad()
def head_sum_pi_squared(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """The sum over the vocabulary of the squared probabilities, (N, H) -> (N,), without gradient, a chunk at a time."""
    parts = []
    for part in hidden.split(chunk_size(weight.shape[0])):
        logits = _logits(part, weight, bias, temperature)
        parts.append((_logsumexp(2 * logits, shard) - 2 * _logsumexp(logits, shard)).exp())
    return torch.cat(parts)


@torch.no_grad()
def head_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """The entropy in nats of the rows of ``hidden`` (N, H) where ``at``, bool (N,), is set, and 0 elsewhere: (N,), without
    gradient, a chunk at a time."""
    found = hidden.new_zeros(len(hidden), dtype=_accurate(hidden.dtype))
    for rows in at.nonzero()[:, 0].split(chunk_size(weight.shape[0])):
        logits = _logits(hidden[rows], weight, bias, temperature)
        log_p = logits.sub_(_logsumexp(logits, shard)[:, None])
        found[rows] = -_summed(log_p.exp().mul_(log_p).sum(-1), shard)
    return found


def head_all_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float) -> Tensor:
    """log_softmax(hidden @ weight.T / temperature), all of it: (N, H) -> (N, V). For what reads whole distributions, and pays."""
    logits = linear(hidden, weight, bias).to(_accurate(hidden.dtype))
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def head_top_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """The two largest log-probs of each distribution, the larger first: (N, H) -> (N, 2), without gradient, chunk by chunk."""
    parts = []
    for part in hidden.split(chunk_size(weight.shape[0])):
        logits = _logits(part, weight, bias, temperature)
        top = logits.topk(2).values
        if shard is not None:
            top = shard.gather(top).movedim(0, 1).flatten(1).topk(2).values
        parts.append(top - _logsumexp(logits, shard)[:, None])
    return torch.cat(parts)


def _logsumexp(logits: Tensor, shard: VocabShard | None) -> Tensor:
    mine = logits.logsumexp(-1)
    return mine if shard is None else shard.gather(mine).logsumexp(0)


def _at(logits: Tensor, targets: Tensor, shard: VocabShard | None) -> Tensor:
    if shard is None:
        return logits.gather(1, targets[:, None])[:, 0]
    rows, mine = shard.local(targets)
    return shard.sum(logits.gather(1, rows[:, None])[:, 0].where(mine, 0.0))


def _summed(parts: Tensor, shard: VocabShard | None) -> Tensor:
    return parts if shard is None else shard.sum(parts)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(C, H) -> (C, V), divided by the temperature, at least float32."""
    logits = linear(hidden, weight, bias).to(_accurate(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _d_logits(ctx: Any, part: slice, d_log_probs: Tensor, d_entropy: Tensor) -> Tensor:
    """(C, V), made in the place of the logits: one buffer without entropy, two with."""
    hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
    log_p = _logits(hidden[part], weight, bias, ctx.temperature).sub_(normaliser[part, None])
    if ctx.want_entropy:
        p = log_p.exp()
        p.mul_(log_p.add_(entropy[part, None]).mul_(d_entropy[:, None]).add_(d_log_probs[:, None]))
    else:
        p = log_p.exp_().mul_(d_log_probs[:, None])
    rows = targets[part]
    if ctx.shard is not None:
        rows, mine = ctx.shard.local(rows)
        d_log_probs = d_log_probs.where(mine, 0.0)
    d_logits = p.neg_().scatter_add_(1, rows[:, None], d_log_probs[:, None])
    return d_logits if ctx.temperature == 1.0 else d_logits.div_(ctx.temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass over ``total``. The product is never rounded to the factors' dtype: each chunk's error
    would be added up. On CUDA the matrix unit sums in float32 anyway; on CPU it takes float32 factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        want_entropy: bool,
        chunks: tuple[int, int],
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        chunk, ctx.chunk = chunks
        log_probs = hidden.new_zeros(len(hidden), dtype=_accurate(hidden.dtype))
        normaliser, entropy = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature)
            normaliser[part] = _logsumexp(logits, shard)
            log_probs[part] = _at(logits, targets[part], shard) - normaliser[part]
            if want_entropy:
                log_p = logits.sub_(normaliser[part, None])
                entropy[part] = -_summed(log_p.exp().mul_(log_p).sum(-1), shard)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.want_entropy, ctx.shard = temperature, want_entropy, shard
        if not want_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """With p the distribution and H its entropy: d log p[y] / d logits = 1[y] - p, d H / d logits = -p (log p + H)."""
        hidden, weight, bias, *_ = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        accurate = _accurate(hidden.dtype)
        # Sums over chunks are kept in float32 whatever the head's dtype.
        d_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=accurate) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            d_logits = _d_logits(ctx, part, d_log_probs[part], d_entropy[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[part])
            del d_logits  # not beside the next chunk's
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None
