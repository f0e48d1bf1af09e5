"""Context parallelism: the flat tokens of a micro-batch, split over the ranks of a context-parallel group.

With causal attention late tokens cost more than early ones, so equal consecutive parts would be unbalanced. The tokens are split
into 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r, one cheap and one expensive (Liu et al. 2023, ring attention's
striping, as zigzag). Keys and values are gathered, which takes memory for those of all T tokens; a rank's queries attend to the
preceding tokens of their own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.collectives import gather, gather_replicated
from workers.engine.hf.packed_attention import varlen


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [start, stop) of this rank attend to keys [keys, ends) of all tokens; last query aligned with last key."""

    start: int
    stop: int
    keys: int
    ends: int


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """Split of T tokens over a context-parallel group.

    place: int64 (T / cp,), the tokens that this rank holds. back: int64 (T,), index of each token in the concatenation of all
    ranks' tokens. pieces: in the order of this rank's tokens. queries, seen: see packed_attention.varlen.
    """

    group: dist.ProcessGroup
    place: Tensor
    back: Tensor
    pieces: tuple[Piece, ...]
    queries: tuple[Tensor, int]
    seen: tuple[Tensor, int]

    @classmethod
    def of(cls, lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> ContextSharding:
        """Build the split. lengths: tokens of the rows; 2 * cp divides their sum T."""
        ranks, total = group.size(), sum(lengths)
        chunk, rest = divmod(total, 2 * ranks)
        assert rest == 0, f"{total} tokens do not fall into {2 * ranks} chunks"
        chunks = torch.arange(total, device=device).split(chunk)
        places = [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]
        rank = group.rank()
        pieces = []
        for number, first in ((rank, 0), (2 * ranks - 1 - rank, chunk)):
            low, high = number * chunk, (number + 1) * chunk
            # A row may extend over several chunks: intersect each row with each of this rank's two chunks.
            for begin, end in zip(accumulate(lengths, initial=0), accumulate(lengths), strict=False):
                start, stop = max(begin, low), min(end, high)
                if start < stop:
                    pieces.append(Piece(first + start - low, first + stop - low, begin, stop))
        queries = [piece.stop - piece.start for piece in pieces]
        seen = [piece.ends - piece.keys for piece in pieces]
        back = torch.cat(places).argsort()
        return cls(group, places[rank], back, tuple(pieces), ends_of(queries, device), ends_of(seen, device))

    def gather(self, mine: Tensor) -> Tensor:
        """All-gather (T / cp, ...) -> (T, ...), in token order; the gradient is summed: each rank uses the result differently."""
        return gather(mine, self.group).index_select(0, self.back)

    def gather_replicated(self, mine: Tensor) -> Tensor:
        """All-gather for a result that all ranks use identically: the gradient is each rank's own slice."""
        return gather_replicated(mine, self.group).index_select(0, self.back)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T / cp, heads, D), k and v (T / cp, kv heads, D) -> (T / cp, heads, D). Collective."""
        k, v = self.gather(k), self.gather(v)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            # varlen takes one run of keys per piece: keys that both chunks of this rank attend to are repeated.
            k, v = (torch.cat([x[piece.keys : piece.ends] for piece in self.pieces]) for x in (k, v))
            return varlen(q, k, v, self.queries, self.seen)
        parts = []
        for piece in self.pieces:
            queries = q[piece.start : piece.stop].transpose(0, 1)[None]
            keys, values = (x[piece.keys : piece.ends].transpose(0, 1)[None] for x in (k, v))
            n, m = queries.shape[2], keys.shape[2]
            # is_causal would align the first query with the first key; in a piece the last ones are aligned.
            seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


def ends_of(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Cumulative offsets, int32 (n + 1,), and the largest length."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32), max(lengths)
