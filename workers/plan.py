"""Who computes what: global batch -> mini-batches -> ranks -> micro-batches. Pure functions of lengths.

No cut changes a gradient: loss weights are written over the whole mini-batch before any of this happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch

from workers.batch import Batch
from workers.seeding import seed_of

MicroBatches = tuple[tuple[int, ...], ...]
"""Row indices of each micro-batch within a rank's share. An empty one runs a dummy row of weight zero."""


@dataclass(frozen=True, slots=True)
class Plan:
    """shares[d]: rows of the global batch for data-parallel rank d; micro_batches[d]: how it cuts them."""

    shares: tuple[tuple[int, ...], ...]
    micro_batches: tuple[MicroBatches, ...]

    def split(self, batch: Batch) -> list[Batch]:
        """The batch's share for each data-parallel rank; the batch itself, if that is all of it in order."""
        whole = tuple(range(len(batch)))
        return [batch if share == whole else batch.select(share) for share in self.shares]

    def of_rows(self, n: int) -> Plan:
        """This is a plan of units, each of n rows that follow one another: the same of the rows."""

        def rows(units: Sequence[int]) -> tuple[int, ...]:
            return tuple(unit * n + i for unit in units for i in range(n))

        cuts = tuple(tuple(rows(part) for part in cut) for cut in self.micro_batches)
        return Plan(shares=tuple(rows(share) for share in self.shares), micro_batches=cuts)

    def collect(self, parts: Sequence[Batch]) -> Batch:
        """What the ranks answered, rows back in the order of the global batch."""
        order = [row for share in self.shares for row in share]
        whole = Batch.concat(parts)
        return whole if order == sorted(order) else whole.select(torch.tensor(order).argsort())


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a micro-batch may be: by tokens (a hard cap) or by rows, whichever is given."""

    max_tokens: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        assert (self.max_tokens is None) != (self.max_rows is None), "one of max_tokens and max_rows"


def row_costs(lengths: Sequence[int], attention_cost: float) -> list[float]:
    """Relative work of each row: its tokens, and its attention, ``attention_cost`` a pair of tokens.

    For a decoder of hidden size H the pair costs about 1 / (12 H) of a token: 24 H^2 FLOPs a token and layer in the
    products, 2 H a pair in causal attention.
    """
    return [length + attention_cost * length * length for length in lengths]


def make_plan(lengths: Sequence[int], n_ranks: int, limits: Limits, *, attention_cost: float = 0.0) -> Plan:
    """Even work on every rank, and the same number of micro-batches.

    lengths: tokens of each of the B rows. Raises ValueError if a row alone is over ``max_tokens``.
    """
    if limits.max_tokens is not None and lengths and max(lengths) > limits.max_tokens:
        row = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, the micro-batch budget is {limits.max_tokens}: "
            f"raise *_max_token_len_per_gpu to at least {lengths[row]}"
        )
    costs = row_costs(lengths, attention_cost)
    shares = _even_parts(range(len(lengths)), costs, n_ranks)
    cuts = [_cut(share, lengths, costs, limits) for share in shares]
    n_slots = max(len(cut) for cut in cuts)
    # A rank with fewer is cut again into as many slots as the fullest rank needs: smaller, but no more of them.
    cuts = [cut if len(cut) == n_slots else _spread(cut, costs, n_slots) for cut in cuts]
    micro_batches = []
    for share, cut in zip(shares, cuts, strict=True):
        place = {row: i for i, row in enumerate(share)}
        micro_batches.append(tuple(tuple(place[row] for row in part) for part in cut))
    return Plan(shares=tuple(tuple(share) for share in shares), micro_batches=tuple(micro_batches))


def mini_batches(uids: Sequence[int], n_groups: int, *, seed: int | None = None) -> list[list[int]]:
    """Rows of each mini-batch: ``n_groups`` prompt groups each, groups kept whole, the last one perhaps smaller.

    uids: the prompt group of each row. Groups come in order of appearance, or, with a seed, in an order that
    depends on the seed and the uid alone: never on the number of ranks.
    """
    groups: dict[int, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    order = list(groups) if seed is None else sorted(groups, key=lambda uid: (seed_of(seed, "mini_batch", uid), uid))
    return [
        sorted(row for uid in order[start : start + n_groups] for row in groups[uid]) for start in range(0, len(order), n_groups)
    ]


def _even_parts(rows: Sequence[int], costs: Sequence[float], n: int) -> list[list[int]]:
    """Largest first, always to the part with the least so far; ties go to the part with fewer rows, then the first.

    rows: ascending. A heap finds that part: n may be a tenth of the rows, and to look at all of them grows with the square.
    """
    parts: list[list[int]] = [[] for _ in range(n)]
    heap = [(0.0, 0, part) for part in range(n)]  # load, rows, which
    for row in _largest_first(rows, costs):
        load, count, part = heap[0]
        parts[part].append(row)
        heapreplace(heap, (load + costs[row], count + 1, part))
    return [sorted(part) for part in parts]


def _largest_first(rows: Sequence[int], sizes: Sequence[float]) -> list[int]:
    """rows: ascending; those of one size stay so."""
    return sorted(rows, key=sizes.__getitem__, reverse=True)


def _cut(share: Sequence[int], lengths: Sequence[int], costs: Sequence[float], limits: Limits) -> list[list[int]]:
    """A share's micro-batches: as few as the limits allow, then evened out if the cap still holds."""
    if not share:
        return [[]]
    if limits.max_rows is not None:
        n = -(-len(share) // limits.max_rows)
        by_cost = _largest_first(share, costs)  # alike lengths meet: attention pads less
        return [sorted(by_cost[i * limits.max_rows : (i + 1) * limits.max_rows]) for i in range(n)]
    assert limits.max_tokens is not None
    rows = _largest_first(share, lengths)
    homes = first_fit([lengths[row] for row in rows], limits.max_tokens)
    even = _even_parts(share, costs, max(homes) + 1)
    if all(sum(lengths[row] for row in part) <= limits.max_tokens for part in even):
        return even
    bins: list[list[int]] = [[] for _ in even]
    for row, home in zip(rows, homes, strict=True):
        bins[home].append(row)
    return [sorted(part) for part in bins]


def first_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The bin of each size, in turn: the first that has room left for it. No size is over ``room``, which every bin has.

    A tree finds that bin: node i knows the most that is free in one bin below 2 i and 2 i + 1, and the bins are its leaves.
    """
    most = min(len(sizes), 2 * sum(sizes) // room + 1)  # one bin at most is half empty, or less full
    leaves = 1 << (most - 1).bit_length()
    free = [room] * (2 * leaves)
    homes = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < size:
                node += 1
        homes.append(node - leaves)
        free[node] -= size
        while node > 1 and free[node // 2] != (largest := max(free[node], free[node ^ 1])):
            node //= 2
            free[node] = largest
    return homes


def _spread(cut: list[list[int]], costs: Sequence[float], n_slots: int) -> list[list[int]]:
    """The same rows in ``n_slots`` parts: the dearest part is halved until there are enough, or only single rows."""
    parts = [list(part) for part in cut]
    while len(parts) < n_slots:
        target = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, sum(costs[row] for row in parts[i])))
        if len(parts[target]) <= 1:
            parts += [[] for _ in range(n_slots - len(parts))]
            break
        parts[target : target + 1] = _even_parts(parts[target], costs, 2)
    return parts
