"""Who computes what: global batch -> mini-batches -> ranks -> micro-batches. Pure functions of lengths.

No cut changes a gradient: loss weights are written over the whole mini-batch before any of this happens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch

from workers.batch import Batch
from workers.seeding import seed_of

EVEN = 1.01  # the most work of a rank, to the least that could be
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

    def rows_by_rank(self) -> list[list[list[int]]]:
        """Of the global batch, in each micro-batch of each rank."""
        by_rank = zip(self.shares, self.micro_batches, strict=True)
        return [[[share[i] for i in part] for part in cut] for share, cut in by_rank]

    def of_rows(self, units: Sequence[Sequence[int]]) -> Plan:
        """This is a plan of units, of these rows each: the same of the rows."""
        by_rank = [[[row for unit in part for row in units[unit]] for part in cut] for cut in self.rows_by_rank()]
        shares = [sorted(row for part in cut for row in part) for cut in by_rank]
        places = [{row: i for i, row in enumerate(share)} for share in shares]
        cuts = ([tuple(sorted(map(place.__getitem__, part))) for part in cut] for place, cut in zip(places, by_rank, strict=True))
        return Plan(shares=tuple(map(tuple, shares)), micro_batches=tuple(map(tuple, cuts)))

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


def check_rows_fit(lengths: Sequence[int], limits: Limits) -> None:
    """Raises ValueError if a row alone is over ``max_tokens``."""
    if limits.max_tokens is not None and lengths and max(lengths) > limits.max_tokens:
        row = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, the micro-batch budget is {limits.max_tokens}: "
            f"raise *_max_token_len_per_gpu to at least {lengths[row]}"
        )


def make_plan(lengths: Sequence[int], n_ranks: int, limits: Limits, *, attention_cost: float = 0.0) -> Plan:
    """Even work on every rank, and the same number of micro-batches.

    lengths: tokens of each of the B rows. Raises ValueError if a row alone is over ``max_tokens``.
    """
    check_rows_fit(lengths, limits)
    return _plan(lengths, row_costs(lengths, attention_cost), n_ranks, limits)


def _plan(lengths: Sequence[int], costs: Sequence[float], n_ranks: int, limits: Limits) -> Plan:
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


def repeats(rows: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Those rows whose group a row before them has."""
    first = {groups[row]: row for row in reversed(rows)}
    return [row for row in rows if first[groups[row]] != row]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of lengths[r] tokens, of which the first prompts[r] are computed once for all rows of a group in a micro-batch."""

    lengths: Sequence[int]
    prompts: Sequence[int]
    groups: Sequence[int]

    def computed(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch of these rows."""
        return sum(self.lengths[row] for row in rows) - sum(self.prompts[row] for row in repeats(rows, self.groups))

    def cost(self, rows: Sequence[int], attention_cost: float) -> float:
        """See row_costs."""
        whole = row_costs([self.lengths[row] for row in rows], attention_cost)
        return sum(whole) - sum(row_costs([self.prompts[row] for row in repeats(rows, self.groups)], attention_cost))

    def plan(self, n_ranks: int, limits: Limits, *, attention_cost: float = 0.0) -> Plan:
        """make_plan for such rows. Groups that stay together cost less, and parts of groups are easier to even out over ranks:
        groups are whole, in halves, in quarters ..., or single rows, whichever leaves the rank with most to do the least; of the
        first that is EVEN enough, no more are tried. Raises ValueError if a row alone is over ``max_tokens``.
        """
        check_rows_fit(self.lengths, limits)
        least = self.cost(range(len(self.lengths)), attention_cost) / n_ranks
        best, best_cost = Plan((), ()), math.inf
        for plan in self._plans(n_ranks, limits, attention_cost):
            cost = max(sum(self.cost(part, attention_cost) for part in cut) for cut in plan.rows_by_rank())
            if cost < best_cost:
                best, best_cost = plan, cost
            if cost <= EVEN * least:
                break
        return best

    def _plans(self, n_ranks: int, limits: Limits, attention_cost: float) -> Iterator[Plan]:
        largest, parts = max(Counter(self.groups).values(), default=1), 1
        while limits.max_tokens is not None and parts < largest:
            units = self._units(parts, limits.max_tokens)
            tokens, costs = [self.computed(unit) for unit in units], [self.cost(unit, attention_cost) for unit in units]
            yield _plan(tokens, costs, n_ranks, limits).of_rows(units)
            parts *= 2
        yield make_plan(self.lengths, n_ranks, limits, attention_cost=attention_cost)

    def sizes(self, plan: Plan) -> list[tuple[int, int]]:
        """Rows and computed tokens of each micro-batch."""
        return [(len(part), self.computed(part)) for cut in plan.rows_by_rank() for part in cut]

    def _units(self, parts: int, max_tokens: int) -> list[list[int]]:
        """Each group in so many parts, or as many more as it takes to have none over ``max_tokens``, which no row is."""
        groups: dict[int, list[int]] = {}
        for row in _largest_first(range(len(self.lengths)), self.lengths):
            groups.setdefault(self.groups[row], []).append(row)
        units = []
        for rows in groups.values():
            n = min(parts, len(rows))
            while max(self.computed(rows[i::n]) for i in range(n)) > max_tokens:
                n += 1
            units += [rows[i::n] for i in range(n)]
        return units


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
