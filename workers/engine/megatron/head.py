"""Heads of the last pipeline stage: hidden states to log-probs or values of complete rows, equal on all its ranks."""

from __future__ import annotations

from collections.abc import Collection

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from workers.engine.logprob import VocabShard, head_entropy, head_log_probs, head_sum_pi_squared, head_top_log_probs
from workers.engine.megatron.packed_gpt import PackedGPT
from workers.engine.megatron.packing import Pack
from workers.engine.megatron.weights import Vocabulary


def values(chunk: PackedGPT, pack: Pack, hidden: Tensor) -> dict[str, Tensor]:
    """hidden (T of this rank, 1, H) -> values (T,), of the state before each token, and last_value (B,)."""
    if chunk.config.sequence_parallel:
        # Every rank has the whole head and computes the same from all tokens, so the gradient is a slice, not a sum.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    after = chunk.output_layer(hidden[:, 0])[:, 0].float()
    cut, total = pack.packed.cut, pack.rows.total_tokens
    after = (after if cut is None else cut.gather_replicated(after))[:total]
    first = pack.rows.positions().to(after.device) == 0
    ends = pack.rows.lengths.cumsum(0).to(after.device) - 1
    # The head computes the value after each token: shift by one for the state before it.
    return {"values": torch.where(first, 0.0, after.roll(1)), "last_value": after.index_select(0, ends)}


def log_probs(chunk: PackedGPT, pack: Pack, hidden: Tensor, outputs: Collection[str], vocabulary: int) -> dict[str, Tensor]:
    """hidden (T of this rank, 1, H) -> log_probs (T,) and the other ``outputs``, 0 where response_mask is not set."""
    # In the backward both regions sum the gradient over ranks: each rank computes with its own rows of the head (VocabShard).
    if chunk.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    hidden, cut, total = hidden[:, 0], pack.packed.cut, pack.rows.total_tokens
    # A token's state predicts the next token of its row, which may be on another context rank: targets are shifted before the
    # split.
    wanted = pack.rows.tokens["response_mask"].bool() & (pack.rows.positions().to(hidden.device) > 0)
    predicts = wanted.new_zeros(pack.padded)
    predicts[: total - 1] = wanted[1:]
    target = torch.zeros(pack.padded, dtype=torch.int64, device=hidden.device)
    target[: total - 1] = pack.rows.tokens["input_ids"][1:]
    sampled = torch.zeros_like(predicts)
    if "sampled_entropy" in outputs:
        sampled[: total - 1] = pack.rows.tokens["entropy_mask"][1:]
    if cut is not None:
        predicts, target, sampled = predicts[cut.place], target[cut.place], sampled[cut.place]
    here = predicts.nonzero()[:, 0]
    temperature = pack.rows.meta["temperature"]
    found = head(chunk, hidden.index_select(0, here), target[here], sampled[here], temperature, outputs, vocabulary)
    results = {}
    for name, out in found.items():
        placed = out.new_zeros(len(hidden), *out.shape[1:]).index_copy(0, here, out)
        whole = placed if cut is None else cut.gather_replicated(placed)
        # Results are at the predecessors; roll() moves them to the predicted tokens.
        results[name] = whole[:total].roll(1, 0)
    return results


def head(
    chunk: PackedGPT,
    hidden: Tensor,
    targets: Tensor,
    sampled: Tensor,
    temperature: float,
    outputs: Collection[str],
    vocabulary: int,
) -> dict[str, Tensor]:
    """hidden (N, H), targets (N,), sampled bool (N,) -> log_probs (N,) and the other ``outputs``.

    Rows of the weight that pad the vocabulary for tensor parallelism are excluded.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    ((weight, start),) = Vocabulary(vocabulary).unshard(chunk.head_weight(), group.rank(), group.size())
    shard = VocabShard(group, start, len(weight)) if group.size() > 1 else None
    value, entropy = head_log_probs(
        hidden, weight, None, targets, temperature=temperature, want_entropy="entropy" in outputs, shard=shard
    )
    found = {"log_probs": value} if entropy is None else {"log_probs": value, "entropy": entropy}
    if "sampled_entropy" in outputs:
        at = sampled.nonzero()[:, 0]
        found["sampled_entropy"] = head_entropy(hidden, weight, None, at, temperature=temperature, shard=shard)
    if "sum_pi_squared" in outputs:
        found["sum_pi_squared"] = head_sum_pi_squared(hidden, weight, None, temperature=temperature, shard=shard)
    if "top_log_probs" in outputs:
        found["top_log_probs"] = head_top_log_probs(hidden, weight, None, temperature=temperature, shard=shard)
    if "all_log_probs" in outputs:
        logits = tensor_parallel.gather_from_tensor_model_parallel_region((hidden @ chunk.head_weight().T).float())
        # Rows that pad the vocabulary must not take part in the softmax.
        found["all_log_probs"] = (logits[:, :vocabulary] / temperature).log_softmax(-1)
    return found
