"""Sampling with temperature, top-k and top-p over a batch of rows, reproducible per request.

Problem: a response must depend on its request's seed only, not on the other rows of the batch, on preemption or on the engine. A
generator per request would mean a call per request and step; one generator for the batch makes rows depend on each other.

Idea: counter-based random numbers. Token number c of a request with seed s uses u = uniforms(stream_keys(s), c), a hash, for all
rows in a few numpy operations. The token is the inverse of the cumulative distribution at u. Sums are taken in float64, first
over blocks of BLOCK tokens and then within one block, so that a GPU sums in parallel and rounding cannot select a token of weight
0. The embedded engine, vLLM (vllm/vllm_sampler.py) and SGLang on CPU (sglang/sglang_cpu.py) share this module: equal logits give
equal tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ELEMENTS_AT_ONCE = 1 << 24  # of (rows, V): bounds the memory of the float64 sums for a large vocabulary
# Tokens per block of the two-level cumulative sum: a GPU sums blocks in parallel, but scans a row from end to end.
BLOCK = 128


def mix64(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64; every bit of the input affects every bit of the output.

    The finaliser of SplitMix64, variant 13 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: list[int]) -> np.ndarray:
    """Initial state of each seed's random stream, uint64 (n,)."""
    return mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64))


def keys_from(keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Keys of the same streams, counted from ``starts``: uniforms(keys_from(keys, starts), starts + c) is uniforms(keys, c)."""
    return keys - starts.astype(np.uint64) * GOLDEN


def uniforms(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Random number ``counts[i]`` of stream ``keys[i]``: float64 (n,) in [0, 1), a multiple of 2^-52.

    52 bits, not 53: u * total < total then holds in float64 for every total, so that inverting a cumulative distribution never
    runs past its end.
    """
    # SplitMix64 advances its state by GOLDEN per number; state c + 1 is computed directly, so that streams need no storage.
    bits = mix64(keys + (counts.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(12)) * 2.0**-52


def sample(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Sample one token for each of n rows; returns tokens int64 (n,) and their log-probs float32 (n,).

    logits (n, V). temperature, top_p, uniform: float64 (n,); top_k: int64 (n,), -1 for all. Temperature 0 takes the largest
    logit; ties go to the lowest id. The log-prob is log_softmax(logits / temperature) over the whole vocabulary, and
    log_softmax(logits) at temperature 0. Where logits are not finite, the log-prob is not finite and the token is undefined.
    """
    parts = [_sample(logits[rows], temperature[rows], top_k[rows], top_p[rows], uniform[rows]) for rows in rows_at_once(logits)]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _sample(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    greedy = temperature == 0
    # Greedy rows are divided by 1: their log-probs are those of the unscaled logits, and 0 would give infinities.
    divisor = np.where(greedy, 1.0, temperature)
    if (divisor != 1).any():
        logits = logits / _column(divisor.astype(np.float32), logits)
    log_probs = logits.log_softmax(-1)
    if greedy.all():
        tokens = logits.argmax(-1, keepdim=True)
    else:
        # Only the token comes from the truncated distribution; log_probs stay those of the whole one.
        tokens = draw_truncated(log_probs.exp(), np.where(greedy, -1, top_k), np.where(greedy, 1.0, top_p), uniform)
        if greedy.any():
            tokens = torch.where(_column(greedy, logits), logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def rows_at_once(logits: Tensor) -> list[slice]:
    """Split the rows of logits (n, V) into slices of at most ELEMENTS_AT_ONCE elements, at least one row each."""
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    return [slice(i, i + rows) for i in range(0, len(logits), rows)]


def draw_truncated(probs: Tensor, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray) -> Tensor:
    """``draw`` from probs (n, V), truncated to top_k and top_p; returns tokens int64 (n, 1)."""
    cut = np.flatnonzero((top_p < 1) | ((top_k > 0) & (top_k < probs.shape[1])))
    if len(cut):  # sort only the rows that truncate, not the whole batch
        chosen = torch.from_numpy(cut).to(probs.device)
        kept = _most_likely(probs[chosen], _column(top_k[cut], probs), _column(top_p[cut], probs))
        probs = probs.index_copy(0, chosen, kept)
    return draw(probs, _column(uniform, probs))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution: the first token whose running sum exceeds ``uniform`` times the total.

    weights float32 (n, V), non-negative, 0 for tokens that cannot be sampled. uniform float64 (n, 1). Returns tokens int64
    (n, 1), undefined where weights are not finite. Running sums are float64: first over blocks, then within one block. Does not
    synchronize with the device.
    """
    blocks = in_blocks(weights)
    block, rest = _block_of(blocks.sum(-1, dtype=torch.float64).cumsum(-1), uniform)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    return (block * BLOCK + _place_of(inside, rest)).clamp_(max=weights.shape[1] - 1)


def in_blocks(weights: Tensor) -> Tensor:
    """Reshape (n, V) to (n, blocks, BLOCK), the last block padded with zeros."""
    n, vocabulary = weights.shape
    return nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(n, -1, BLOCK)


def _block_of(sums: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Find the block in which the running sum passes the target.

    sums (n, blocks): running sums. Returns the block, int64 (n, 1), and the remainder of the target within it, float64 (n, 1).
    """
    target = uniform * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    return block, target - nn.functional.pad(sums, (1, 0)).gather(1, block)


def _place_of(weights: Tensor, rest: Tensor) -> Tensor:
    """Position within a block, int64 (n, 1). weights (n, BLOCK); rest float64 (n, 1): remainder of the target."""
    inside = weights.cumsum(-1, dtype=torch.float64)
    # ``rest`` derives from a sum of the block in another order and may exceed this one by rounding: stay below its end.
    below_all = inside[:, -1:] * (1 - 2.0**-52)
    return torch.searchsorted(inside, torch.minimum(rest, below_all), right=True)


def draw_from_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``draw`` from softmax(logits / temperature), except for rows with a given token; also returns log-probs.

    logits (n, V), temperature float32 (n, 1), uniform float64 (n, 1); given int64 (n, 1), negative where a token is to be
    sampled. Returns tokens int64 (n, 1) and their log-probs float32 (n, 1). When compiled, it writes no intermediate of the
    logits' size: the softmax is never materialised, and only one block per row is read a second time.
    """
    vocabulary = logits.shape[1]
    scaled = logits.float() / temperature
    largest = scaled.amax(-1, keepdim=True)
    sums = in_blocks((scaled - largest).exp()).sum(-1, dtype=torch.float64).cumsum(-1)
    block, rest = _block_of(sums, uniform)
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = logits.gather(1, ids.clamp(max=vocabulary - 1)).float() / temperature
    place = _place_of((inside - largest).exp(), rest)
    tokens = (block * BLOCK + place).clamp_(max=vocabulary - 1)  # beyond the vocabulary, ids were clamped to the last token
    if given is not None:
        tokens = torch.where(given < 0, tokens, given)
    return tokens, logits.gather(1, tokens).float() / temperature - largest - sums[:, -1:].log().float()


def _most_likely(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero ``probs`` (n, V) outside the top_k most likely tokens, then outside the smallest set with top_p of their mass.

    Ties go to the lower id. top_k int64 (n, 1), -1: all. top_p float64 (n, 1), 1: all.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)  # stable: ties keep the order of their ids
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = (rank < top_k) | (top_k <= 0)
    ordered = (ordered * kept).double()
    before = ordered.cumsum(-1) - ordered  # exclusive sum: the token that reaches top_p is still kept
    kept &= (before < top_p * ordered.sum(-1, keepdim=True)) | (top_p >= 1)
    return probs * torch.zeros_like(kept).scatter_(1, ids, kept)
