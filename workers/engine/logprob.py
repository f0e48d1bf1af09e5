"""Log-probs and entropy of a language head without materialising (T, V) in float32.

At V = 152k the logits take more memory than anything else. They are computed one chunk of positions at a time and recomputed in
the backward: three matrix products instead of two, and the memory of one chunk instead of all positions (measured: 605 MB instead
of 2978 at V 152k, T 1k, in the same time).

What follows a chunk's product is elementwise or a sum over the vocabulary. By count of its operands, one kernel per operation
reads and writes about 80 bytes per logit in a train step; compiled (``fused``), about 16: float32 logits are never written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from workers.compilation import compiled


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Vocabulary-parallel head: rows [start, start + rows) of the weight are on this rank of ``group``.

    Every rank has the same hidden states. Outputs are equal on all ranks. Gradients of the hidden states are partial sums that
    the caller has to add up over the group.
    """

    group: dist.ProcessGroup
    start: int
    rows: int

    def sum(self, mine: Tensor) -> Tensor:
        """All-reduce ``mine`` in place and return it."""
        dist.all_reduce(mine, group=self.group)
        return mine

    def gather(self, mine: Tensor) -> Tensor:
        """All-gather (...) of each rank -> (ranks, ...). Shapes must be equal."""
        whole = mine.new_empty(self.group.size() * mine.numel())
        dist.all_gather_into_tensor(whole, mine.flatten(), group=self.group)
        return whole.view(self.group.size(), *mine.shape)

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids -> row indices in this shard (0 for tokens of other shards), and a mask of this shard's tokens."""
        rows = targets - self.start
        mine = (rows >= 0) & (rows < self.rows)
        return rows.where(mine, 0), mine


def chunk_size(vocabulary: int, *, fused: bool = False) -> int:
    """Positions per chunk of a forward.

    Peak memory is about 3 * chunk * V * 4 bytes, fused chunk * V * 2 in bfloat16; larger chunks are not faster.
    """
    if fused:
        return 1024
    return 512 if vocabulary <= 32768 else 256


def backward_chunk_size(vocabulary: int, hidden: int, *, fused: bool = False) -> int:
    """Positions per chunk of a backward, larger than in the forward if V is large.

    Each chunk reads and writes the whole gradient of the head, (V, H) in float32, so fewer and larger chunks cause less traffic.
    For large V: the largest power of two up to H, which makes the logits at
    least half as large as that gradient, but at most 2048. At 7B this saves 7 % of a step on an H200, for 0.6 GB.
    Fused: 2048, since logits are in the compute dtype alone.
    """
    if fused:
        return 2048
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
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(hidden @ weight.T / temperature) at ``targets`` and, optionally, the entropy of the distribution in nats.

    hidden (N, H), weight (V, H), bias (V,), targets int64 (N,) -> log_probs (N,), entropy (N,) or None. The product is computed
    in the dtype of ``hidden``, everything after it in float32 (float64 for float64). Both results are differentiable once.
    chunk: positions per chunk, in both directions; None: chosen by V and H. shard: weight and bias are these rows of the full
    head; then collective over its group. fused: compile what follows the products; without effect on a shard, whose collectives
    are in between.
    """
    fused = fused and shard is None
    chunks = (chunk_size(weight.shape[0], fused=fused), backward_chunk_size(*weight.shape, fused=fused))
    if chunk is not None:
        chunks = (chunk, chunk)
    log_probs, entropy = _HeadLogProbs.apply(hidden, weight, bias, targets, temperature, want_entropy, chunks, shard, fused)
    return log_probs, entropy if want_entropy else None


@torch.no_grad()
def head_sum_pi_squared(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """Sum over the vocabulary of the squared probabilities, (N, H) -> (N,), chunked, without gradient."""
    parts = []
    for part in hidden.split(chunk_size(weight.shape[0])):
        logits = _logits(part, weight, bias, temperature)
        # sum_v pi_v^2 = sum_v exp(2 z_v) / (sum_v exp(z_v))^2, in log space against overflow.
        parts.append((_logsumexp(2 * logits, shard) - 2 * _logsumexp(logits, shard)).exp())
    return torch.cat(parts)


@torch.no_grad()
def head_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """Entropy in nats at the positions ``at``, int64 (M,), 0 elsewhere: (N, H) -> (N,), chunked, without gradient."""
    found = hidden.new_zeros(len(hidden), dtype=_accurate(hidden.dtype))
    # Vocabulary-parallel ranks have the same ``at``, so that all of them run the same number of chunks and collectives.
    for rows in at.split(chunk_size(weight.shape[0])):
        logits = _logits(hidden[rows], weight, bias, temperature)
        log_p = logits.sub_(_logsumexp(logits, shard)[:, None])
        found[rows] = -_summed(log_p.exp().mul_(log_p).sum(-1), shard)
    return found


def head_all_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float) -> Tensor:
    """log_softmax(hidden @ weight.T / temperature) in full: (N, H) -> (N, V), with gradient.

    For losses that read whole distributions; takes the memory that the other functions avoid.
    """
    logits = linear(hidden, weight, bias).to(_accurate(hidden.dtype))
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def head_top_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, shard: VocabShard | None = None
) -> Tensor:
    """The two largest log-probs of each distribution, descending: (N, H) -> (N, 2), chunked, without gradient."""
    parts = []
    for part in hidden.split(chunk_size(weight.shape[0])):
        logits = _logits(part, weight, bias, temperature)
        top = logits.topk(2).values
        if shard is not None:
            # The two largest of all are among the two largest of each shard.
            top = shard.gather(top).movedim(0, 1).flatten(1).topk(2).values
        parts.append(top - _logsumexp(logits, shard)[:, None])
    return torch.cat(parts)


def _logsumexp(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """Log-sum-exp over the full vocabulary, (C, V) -> (C,): that of the shards' log-sum-exps."""
    if torch.compiler.is_compiling():
        # For these operations Inductor generates a kernel of one pass, for logsumexp one of two.
        top = logits.amax(-1, keepdim=True)
        mine = (top + (logits - top).exp().sum(-1, keepdim=True).log())[:, 0]
    else:
        mine = logits.logsumexp(-1)
    return mine if shard is None else shard.gather(mine).logsumexp(0)


def _at(logits: Tensor, targets: Tensor, shard: VocabShard | None) -> Tensor:
    """Logits at the target tokens, (C, V) -> (C,). With shards all ranks but the target's contribute 0 to the sum."""
    if shard is None:
        return logits.gather(1, targets[:, None])[:, 0]
    rows, mine = shard.local(targets)
    return shard.sum(logits.gather(1, rows[:, None])[:, 0].where(mine, 0.0))


def _summed(parts: Tensor, shard: VocabShard | None) -> Tensor:
    return parts if shard is None else shard.sum(parts)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(C, H) -> (C, V), divided by the temperature, at least in float32."""
    return _scaled(linear(hidden, weight, bias), temperature)


def _scaled(product: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature, at least in float32; in place if ``product`` is as wide."""
    logits = product.to(_accurate(product.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """float32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _forward_chunk(
    product: Tensor, targets: Tensor, temperature: float, want_entropy: bool, shard: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-normaliser, log-prob of the target and entropy of each position, (C,) each.

    product: hidden @ weight.T + bias, (C, V); the caller gives it up, and it is freed or overwritten. targets: int64 (C,).
    """
    logits = _scaled(product, temperature)
    del product
    normaliser = _logsumexp(logits, shard)
    log_probs = _at(logits, targets, shard) - normaliser
    if not want_entropy:
        return normaliser, log_probs, None
    # In place, so only after the target's logit was read.
    log_p = logits.sub_(normaliser[:, None])
    return normaliser, log_probs, -_summed(log_p.exp().mul_(log_p).sum(-1), shard)


def _backward_chunk(
    product: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
    shard: VocabShard | None,
    want_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the product (C, V), in its dtype, and with ``want_bias`` of the bias (V,).

    Computed in place of the logits: one buffer without entropy, two with it. With p the distribution and H its entropy:
    d_logits = -p (d_log_probs + d_entropy (log p + H)) + d_log_probs at the target.
    product: see _forward_chunk. entropy, d_entropy: None if the entropy has no gradient.
    """
    dtype, log_p = product.dtype, _scaled(product, temperature).sub_(normaliser[:, None])
    del product
    if entropy is not None and d_entropy is not None:
        p = log_p.exp()
        p.mul_(log_p.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_log_probs[:, None]))
    else:
        p = log_p.exp_().mul_(d_log_probs[:, None])
    if torch.compiler.is_compiling():
        # A scatter would split the kernel in two, with p in float32 written and read in between.
        here = torch.arange(p.shape[1], device=p.device) == targets[:, None]
        d_logits = torch.where(here, d_log_probs[:, None] - p, -p)
    else:
        if shard is not None:
            # The 1[y] of a token in another shard is added by the rank that holds its row.
            targets, mine = shard.local(targets)
            d_log_probs = d_log_probs.where(mine, 0.0)
        d_logits = p.neg_().scatter_add_(1, targets[:, None], d_log_probs[:, None])
    if temperature != 1.0:
        d_logits = d_logits.div_(temperature)
    return d_logits.to(dtype), d_logits.sum(0) if want_bias else None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once per process, for any number of positions: the last chunk is shorter."""
    return compiled(function)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass over ``total``.

    The product is not rounded to the dtype of its factors: the rounding errors of all chunks would accumulate. Tensor cores sum
    in float32 anyway; on the CPU the factors are converted to float32.
    """
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
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        chunk, ctx.chunk = chunks
        log_probs = hidden.new_zeros(len(hidden), dtype=_accurate(hidden.dtype))
        normaliser, entropy = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        run = _compiled(_forward_chunk) if fused else _forward_chunk
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            # The product has no name here: it is freed as soon as the logits are there.
            normaliser[part], log_probs[part], in_nats = run(
                linear(hidden[part], weight, bias), targets[part], temperature, want_entropy, shard
            )
            if in_nats is not None:
                entropy[part] = in_nats
        # One number per position instead of (N, V) logits: with the normaliser a chunk's distribution can be recomputed.
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.want_entropy, ctx.shard, ctx.fused = temperature, want_entropy, shard, fused
        if not want_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Accumulate gradients chunk by chunk: d log p[y] / d logits = 1[y] - p, d H / d logits = -p (log p + H)."""
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        accurate = _accurate(hidden.dtype)
        # Accumulate over chunks in float32 whatever the head's dtype.
        d_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=accurate) if ctx.needs_input_grad[2] else None
        run: Callable[..., tuple[Tensor, Any]] = _compiled(_backward_chunk) if ctx.fused else _backward_chunk
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            d_logits, d_bias_here = run(
                linear(hidden[part], weight, bias),
                targets[part],
                normaliser[part],
                entropy[part] if ctx.want_entropy else None,
                d_log_probs[part],
                d_entropy[part] if ctx.want_entropy else None,
                ctx.temperature,
                ctx.shard,
                d_bias is not None,
            )
            if d_bias is not None:
                d_bias += d_bias_here
            # With a shard a partial sum: the caller adds it up over the group, once for all chunks.
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[part])
            del d_logits  # free (C, V) before the next chunk allocates its own
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None
