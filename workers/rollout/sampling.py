"""Temperature, top-k and top-p over a batch of rows, and draws that depend on a request and a position alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ELEMENTS_AT_ONCE = 1 << 24  # of (rows, V): bounds the memory of a large vocabulary's float64 sums
BLOCK = (
    128  # tokens whose probabilities are summed before any is looked at: a GPU sums blocks at once, a row only from end to end
)


def mix64(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, every bit of the input in every bit of the output: the finaliser of SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, variant 13)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: list[int]) -> np.ndarray:
    """Where each seed's stream of draws starts: uint64."""
    return mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64))


def uniforms(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draw number ``counts[i]`` of stream ``keys[i]``: float64 in [0, 1), a multiple of 2^-52.

    52 bits, not 53: then u * total < total in float64 whatever the total, so an inverted distribution never runs off its end.
    """
    bits = mix64(keys + (counts.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(12)) * 2.0**-52


def sample(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> tuple[Tensor, Tensor]:
    """One token for each of n rows: tokens int64 (n,) and their log-probs float32 (n,).

    logits (n, V). temperature, top_p, uniform: float64 (n,); top_k: int64 (n,), -1 for all. Temperature 0 takes the largest
    logit, of equal ones the lowest id. The log-prob is log_softmax(logits / temperature), of the logits as they are at
    temperature 0, over the whole vocabulary. Where logits are not finite, so is the log-prob, and the token means nothing.
    """
    parts = [_sample(logits[rows], temperature[rows], top_k[rows], top_p[rows], uniform[rows]) for rows in rows_at_once(logits)]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _sample(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> tuple[Tensor, Tensor]:
    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(logits.device)[:, None]

    logits = logits.float()
    greedy = temperature == 0
    divisor = np.where(greedy, 1.0, temperature)
    if (divisor != 1).any():
        logits = logits / column(divisor.astype(np.float32))
    log_probs = logits.log_softmax(-1)
    if greedy.all():
        tokens = logits.argmax(-1, keepdim=True)
    else:
        probs = log_probs.exp()
        cut = np.flatnonzero(~greedy & ((top_p < 1) | ((top_k > 0) & (top_k < logits.shape[1]))))
        if len(cut):
            chosen = torch.from_numpy(cut).to(logits.device)
            probs[chosen] = _most_likely(probs[chosen], column(top_k[cut]), column(top_p[cut]))
        tokens = draw(probs, column(uniform))
        if greedy.any():
            tokens = torch.where(column(greedy), logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]


def rows_at_once(logits: Tensor) -> list[slice]:
    """logits (n, V): all rows, ELEMENTS_AT_ONCE at a time."""
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    return [slice(i, i + rows) for i in range(0, len(logits), rows)]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens int64 (n, 1): where the running sum of a row's weights, in float64, passes the share ``uniform`` of it all.

    weights float32 (n, V), not negative, 0 for what is never drawn. uniform float64 (n, 1). The sums of blocks are passed
    first, then the weights of one block. Nothing waits for the device. Where weights are not finite the token means nothing.
    """
    blocks = in_blocks(weights)
    block, rest = _block_of(blocks.sum(-1, dtype=torch.float64).cumsum(-1), uniform)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    return (block * BLOCK + _place_of(inside, rest)).clamp_(max=weights.shape[1] - 1)


def in_blocks(weights: Tensor) -> Tensor:
    """(n, V) -> (n, blocks, BLOCK), the last block filled up with zeros."""
    n, vocabulary = weights.shape
    return nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(n, -1, BLOCK)


def _block_of(sums: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """sums (n, blocks), running. int64 (n, 1): the block that holds the share; float64 (n, 1): how far into it."""
    target = uniform * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    return block, target - nn.functional.pad(sums, (1, 0)).gather(1, block)


def _place_of(weights: Tensor, rest: Tensor) -> Tensor:
    """weights (n, BLOCK), rest float64 (n, 1). int64 (n, 1): within the block."""
    inside = weights.cumsum(-1, dtype=torch.float64)
    below_all = inside[:, -1:] * (1 - 2.0**-52)  # the block was summed in another order: its end must not be passed
    return torch.searchsorted(inside, torch.minimum(rest, below_all), right=True)


def draw_from_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As ``draw`` from softmax(logits / temperature), but where a token is given. Tokens int64 (n, 1), log-probs float32 (n, 1).

    logits (n, V), temperature float32 (n, 1), uniform float64 (n, 1); given int64 (n, 1), negative where a token is to be drawn.
    Compiled, it writes nothing of the size of the logits.
    """
    vocabulary = logits.shape[1]
    scaled = logits.float() / temperature
    largest = scaled.amax(-1, keepdim=True)
    sums = in_blocks((scaled - largest).exp()).sum(-1, dtype=torch.float64).cumsum(-1)
    block, rest = _block_of(sums, uniform)
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = logits.gather(1, ids.clamp(max=vocabulary - 1)).float() / temperature
    place = _place_of((inside - largest).exp(), rest)
    tokens = (block * BLOCK + place).clamp_(max=vocabulary - 1)  # behind the last token are only copies of it
    if given is not None:
        tokens = torch.where(given < 0, tokens, given)
    return tokens, logits.gather(1, tokens).float() / temperature - largest - sums[:, -1:].log().float()


def _most_likely(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs (n, V), 0 outside the top_k most likely tokens and then outside the fewest of those that hold top_p of their mass.

    Of equally likely tokens the lower id goes first. top_k int64 (n, 1), -1: all. top_p float64 (n, 1), 1: all.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = (rank < top_k) | (top_k <= 0)
    ordered = (ordered * kept).double()
    before = ordered.cumsum(-1) - ordered
    kept &= (before < top_p * ordered.sum(-1, keepdim=True)) | (top_p >= 1)
    return probs * torch.zeros_like(kept).scatter_(1, ids, kept)
