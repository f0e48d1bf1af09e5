"""Prefix sharing: rows of a micro-batch run through the model together, and each of their common prefixes only once.

A prefix that several rows share (workers/prefixes.py) is computed once, and each of its continuations attends to the one copy of
its keys and values. The result equals that of complete rows up to rounding, with fewer tokens in every layer (Liu et al. 2025,
"Prefix Grouper", arXiv 2506.05433; here a forest of prefixes, several trees and complete rows in one sequence). The cost is index
arithmetic per micro-batch, and a gather of keys and values in each layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from workers.engine.micro_batch import to_device
from workers.prefixes import Chain


@dataclass(frozen=True, slots=True)
class Stretch:
    """A contiguous run of computed tokens: a shared prefix after its parent, the rest of a row after one, or a complete row.

    start: first token of its row among all T tokens. before: preceding tokens of the row that it attends to but that are computed
    elsewhere. length: its own tokens.
    """

    start: int
    before: int
    length: int

    @property
    def seen(self) -> int:
        """Number of tokens that its last token attends to."""
        return self.before + self.length


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Indices that map B rows with T tokens to the C <= T tokens that are computed.

    computed: int64 (C,), indices of the computed tokens among all T. places: int64 (T,), for each token the index of its computed
    copy among those C. seen: int64 (K,), indices among the C of the keys of each stretch, stretches concatenated.
    padding: tokens of one more row at the end, without meaning, that T and C include.
    """

    stretches: tuple[Stretch, ...]
    computed: Tensor
    places: Tensor
    seen: Tensor
    padding: int

    @classmethod
    def of(
        cls, lengths: Sequence[int], chains: Sequence[Chain], device: torch.device, unit: int = 1, *, always: bool = False
    ) -> SharedPrefixes | None:
        """Build the mapping for one micro-batch; None if its rows share nothing, unless ``always``.

        lengths, chains: tokens of each of the B rows and its prefixes. unit: C is padded to a multiple of it.
        """
        starts, splits = np.cumsum([0, *lengths]).tolist(), _splits(lengths, chains)
        owners: dict[int, tuple[int, int, int]] = {}  # (row, first token, end) of a stretch, by its first node or ~row
        copies = []
        for row, chain in enumerate(chains):
            begin, key = 0, None
            for node, end in (*chain, (~row, lengths[row])):
                key = node if key is None else key
                if end > begin and (node in splits or node == ~row):
                    # Where no row branches off, a row that ends within another one has part of the other's stretch.
                    if key not in owners or end > owners[key][2]:
                        owners[key] = row, begin, end
                    copies.append((key, row, begin, end))
                    begin, key = end, None
        stretches = [Stretch(starts[row], begin, end - begin) for row, begin, end in owners.values()]
        if (n_computed := sum(stretch.length for stretch in stretches)) == starts[-1] and not always:
            return None
        stretches.sort(key=lambda stretch: (-stretch.seen, -stretch.length, stretch.start))  # equal shapes: one attention call
        # Computed tokens are split evenly over Ulysses ranks, so these are padded and not the rows.
        if padding := -n_computed % unit:
            stretches.append(Stretch(starts[-1], 0, padding))
        computed = np.concatenate([np.arange(s.start + s.before, s.start + s.seen) for s in stretches])
        places = np.empty(starts[-1] + padding, dtype=np.int64)
        places[computed] = np.arange(len(computed))
        for key, row, begin, end in copies:
            first = starts[owners[key][0]]
            places[starts[row] + begin : starts[row] + end] = places[first + begin : first + end]
        seen = np.concatenate([places[s.start : s.start + s.seen] for s in stretches])
        on_device = [to_device(torch.from_numpy(x), device) for x in (computed, places, seen)]
        return cls(tuple(stretches), on_device[0], on_device[1], on_device[2], padding)


def _splits(lengths: Sequence[int], chains: Sequence[Chain]) -> set[int]:
    """Nodes at which a stretch ends: several continuations follow, or several rows have it as their first prefix."""
    followers: dict[int, set[int]] = {}
    for row, chain in enumerate(chains):
        rest = [(~row, lengths[row])] if chain and lengths[row] > chain[-1][1] else []
        for (node, _), (follower, _) in pairwise((*chain, *rest)):
            followers.setdefault(node, set()).add(follower)
    roots = Counter(chain[0][0] for chain in chains if chain)
    return {node for node, after in followers.items() if len(after) > 1} | {node for node, n in roots.items() if n > 1}
