"""Assignment of work: global batch -> mini-batches -> ranks -> micro-batches. Pure functions of lengths.

The problem: every rank must run the same number of micro-batches (collectives), none over its token limit, with equal work. Rows
are assigned greedily, largest first, by estimated FLOPs; micro-batches are then bin-packed by tokens.

No split changes a gradient, apart from rounding: loss weights are computed over the whole mini-batch before it is split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

import torch

from workers.batch import Batch
from workers.prefixes import Chain, repeated
from workers.seeding import seed_of

EVEN = 1.01  # accepted imbalance: work of the busiest rank / smallest possible work per rank
FIXED = 1 / 32
"""Work of a micro-batch that does not depend on its tokens (launching kernels, gathering parameters), in full micro-batches."""
MicroBatches = tuple[tuple[int, ...], ...]
"""Row indices of each micro-batch within a rank's shard. An empty micro-batch runs a dummy row of weight zero."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of rows. shards[d]: rows of the global batch on data-parallel rank d; micro_batches[d]: their micro-batches."""

    shards: tuple[tuple[int, ...], ...]
    micro_batches: tuple[MicroBatches, ...]

    def split(self, batch: Batch) -> list[Batch]:
        """Select the shard of each data-parallel rank; a shard that is the whole batch, in order, is not copied."""
        whole = tuple(range(len(batch)))
        return [batch if share == whole else batch.select(share) for share in self.shards]

    def rows_by_rank(self) -> list[list[list[int]]]:
        """Rows of the global batch, by rank and micro-batch."""
        by_rank = zip(self.shards, self.micro_batches, strict=True)
        return [[[share[i] for i in part] for part in cut] for share, cut in by_rank]

    def of_rows(self, units: Sequence[Sequence[int]]) -> Plan:
        """Convert a plan of units into a plan of rows. units[u]: the rows of unit u."""
        by_rank = [[[row for unit in part for row in units[unit]] for part in cut] for cut in self.rows_by_rank()]
        # Ascending, so that a shard which is the whole batch is recognised as such and not copied.
        shares = [sorted(row for part in cut for row in part) for cut in by_rank]
        places = [{row: i for i, row in enumerate(share)} for share in shares]
        cuts = ([tuple(sorted(map(place.__getitem__, part))) for part in cut] for place, cut in zip(places, by_rank, strict=True))
        return Plan(shards=tuple(map(tuple, shares)), micro_batches=tuple(map(tuple, cuts)))

    def collect(self, parts: Sequence[Batch]) -> Batch:
        """Concatenate the ranks' results and restore the row order of the global batch."""
        order = [row for share in self.shards for row in share]
        return Batch.concat(parts, None if order == sorted(order) else torch.tensor(order).argsort())


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum size of a micro-batch: by tokens (never exceeded) or by rows. Exactly one is set."""

    max_tokens: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        assert (self.max_tokens is None) != (self.max_rows is None), "one of max_tokens and max_rows"


def row_costs(lengths: Sequence[int], attention_cost: float) -> list[float]:
    """Relative work of each row: its tokens plus ``attention_cost`` per pair of tokens.

    For a decoder of hidden size H a pair costs about 1 / (12 H) of a token: 24 H^2 FLOPs per token and layer in matrix products,
    2 H per pair in causal attention.
    """
    return [length + attention_cost * length * length for length in lengths]


def check_rows_fit(lengths: Sequence[int], limits: Limits) -> None:
    """Raise ValueError if a single row exceeds ``max_tokens``."""
    if limits.max_tokens is not None and lengths and max(lengths) > limits.max_tokens:
        row = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, the micro-batch budget is {limits.max_tokens}: "
            f"raise *_max_token_len_per_gpu to at least {lengths[row]}"
        )


def make_plan(lengths: Sequence[int], n_ranks: int, limits: Limits, *, attention_cost: float = 0.0) -> Plan:
    """Plan with balanced work on every rank, and the same number of micro-batches on each.

    lengths: tokens of each of the B rows. Raises ValueError if a single row exceeds ``max_tokens``.
    """
    check_rows_fit(lengths, limits)
    return _plan(lengths, row_costs(lengths, attention_cost), n_ranks, limits)


def _plan(lengths: Sequence[int], costs: Sequence[float], n_ranks: int, limits: Limits) -> Plan:
    shares = _even_parts(range(len(lengths)), costs, n_ranks)
    cuts = [_cut(share, lengths, costs, limits) for share in shares]
    n_slots = max(len(cut) for cut in cuts)
    # All ranks run as many micro-batches as the fullest rank: each micro-batch is a round of collectives. A rank with fewer is
    # split further, so that its micro-batches are smaller.
    cuts = [cut if len(cut) == n_slots else _spread(cut, costs, n_slots) for cut in cuts]
    micro_batches = []
    for share, cut in zip(shares, cuts, strict=True):
        place = {row: i for i, row in enumerate(share)}
        micro_batches.append(tuple(tuple(place[row] for row in part) for part in cut))
    return Plan(shards=tuple(tuple(share) for share in shares), micro_batches=tuple(micro_batches))


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows whose common prefixes are computed once per micro-batch.

    lengths[r]: tokens of row r. chains[r]: prefixes that it shares with other rows. A tree: the rows with the same first prefix.
    units[r]: its unit, whose rows stay in one micro-batch; None: each row is a unit. A limit in rows counts units.
    """

    lengths: Sequence[int]
    chains: Sequence[Chain]
    units: Sequence[int] | None = None

    def members(self) -> list[list[int]]:
        """Rows of each unit, in the order of their first rows."""
        units: dict[int, list[int]] = {}
        for row, unit in enumerate(range(len(self.lengths)) if self.units is None else self.units):
            units.setdefault(unit, []).append(row)
        return list(units.values())

    def unit_tokens(self) -> list[int]:
        """Tokens that each unit computes alone."""
        return list(self.lengths) if self.units is None else [self.computed(rows) for rows in self.members()]

    def computed(self, rows: Sequence[int]) -> int:
        """Tokens that a micro-batch of these rows computes: each shared prefix counts once."""
        return sum(self.lengths[row] for row in rows) - sum(repeated(rows, self.chains))

    def cost(self, rows: Sequence[int], attention_cost: float) -> float:
        """Work of a micro-batch of these rows, in the unit of ``row_costs``; repeated prefixes cost nothing."""
        whole = row_costs([self.lengths[row] for row in rows], attention_cost)
        return sum(whole) - sum(row_costs(repeated(rows, self.chains), attention_cost))

    def plan(self, n_ranks: int, limits: Limits, *, attention_cost: float = 0.0) -> Plan:
        """Plan such rows, see ``make_plan``. Raises ValueError if a single row or unit exceeds ``max_tokens``.

        Trees that stay together cost less; parts of trees fill micro-batches, and are easier to balance over ranks. Whole trees,
        trees that are cut where a micro-batch is full, halves, quarters, ..., single branches and single units are tried, and the
        plan with the least work on the busiest rank wins. The search ends at a plan whose busiest rank has at most EVEN times the
        smallest possible work, and after full micro-batches if the best plan is balanced.
        """
        check_rows_fit(self.lengths, limits)
        self._check_units_fit(limits)
        rows = range(len(self.lengths))
        least = self.cost(rows, attention_cost) / n_ranks
        if limits.max_tokens is not None:
            least += FIXED * limits.max_tokens * -(-self.computed(rows) // (n_ranks * limits.max_tokens))
        best, busiest, mean = Plan((), ()), math.inf, 0.0
        for i, plan in enumerate(self._plans(n_ranks, limits, attention_cost)):
            work = self.work(plan, limits, attention_cost)
            if max(work) < busiest:
                best, busiest, mean = plan, max(work), sum(work) / n_ranks
            if busiest <= EVEN * (least if i == 0 else max(least, mean)):
                break
        return best

    def work(self, plan: Plan, limits: Limits, attention_cost: float = 0.0) -> list[float]:
        """Work of each rank, in the unit of ``row_costs``."""
        fixed = FIXED * (limits.max_tokens or 0)
        return [sum(fixed + self.cost(part, attention_cost) for part in cut) for cut in plan.rows_by_rank()]

    def _plans(self, n_ranks: int, limits: Limits, attention_cost: float) -> Iterator[Plan]:
        """Yield candidate plans: whole trees, filled micro-batches, halves, quarters, ..., finally single units."""
        members = self.members()
        largest, parts = max(Counter(self._root(rows[0]) for rows in members).values(), default=1), 1
        # A limit in rows would count parts of trees instead, so trees are not kept together under it.
        while limits.max_tokens is not None and parts < largest:
            yield self._plan_of(self._parts_of_trees(parts, limits.max_tokens), n_ranks, limits, attention_cost)
            if parts == 1:
                yield self._plan_of(self._full_parts(n_ranks, limits.max_tokens), n_ranks, limits, attention_cost)
            parts *= 2
        if self.units is None:
            yield make_plan(self.lengths, n_ranks, limits, attention_cost=attention_cost)
        else:
            yield self._plan_of(members, n_ranks, limits, attention_cost)

    def _plan_of(self, parts: Sequence[Sequence[int]], n_ranks: int, limits: Limits, attention_cost: float) -> Plan:
        """Plan that keeps the rows of each part together."""
        tokens, costs = [self.computed(rows) for rows in parts], [self.cost(rows, attention_cost) for rows in parts]
        return _plan(tokens, costs, n_ranks, limits).of_rows(parts)

    def sizes(self, plan: Plan) -> list[tuple[int, int]]:
        """Units and computed tokens of each micro-batch."""
        units = range(len(self.lengths)) if self.units is None else self.units
        return [(len({units[row] for row in part}), self.computed(part)) for cut in plan.rows_by_rank() for part in cut]

    def _check_units_fit(self, limits: Limits) -> None:
        if limits.max_tokens is None or self.units is None:
            return
        for rows, tokens in zip(self.members(), self.unit_tokens(), strict=True):
            if tokens > limits.max_tokens:
                shared = sum(self.lengths[row] for row in rows) - tokens
                parts = " + ".join(str(self.lengths[row]) for row in rows) + (f" - {shared} shared" if shared else "")
                raise ValueError(
                    f"rows {', '.join(map(str, rows))} of one trajectory or pair have {parts} = {tokens} tokens, which the loss "
                    f"needs in one micro-batch, and the micro-batch budget is {limits.max_tokens}: raise "
                    f"*_max_token_len_per_gpu to at least {tokens}"
                )

    def _parts_of_trees(self, parts: int, max_tokens: int) -> list[list[int]]:
        """Rows of each part of the trees: ``parts`` of each, or as many more as needed for none to exceed ``max_tokens``.

        No single unit exceeds it (_check_units_fit), so this always ends. Branches are dealt out by length, which balances parts.
        A unit counts to the tree and the branch of its first row: its rows are turns of one conversation.
        """
        members, trees = self.members(), dict[int, dict[int, list[list[int]]]]()
        for unit in _largest_first(range(len(members)), self.unit_tokens()):
            row = members[unit][0]
            # The first node is the tree's, commonly a prompt; the second one identifies the branch.
            branch = self.chains[row][1][0] if len(self.chains[row]) > 1 else ~row
            trees.setdefault(self._root(row), {}).setdefault(branch, []).append(members[unit])
        found = []
        for tree in trees.values():
            branches = [part for units in tree.values() for part in self._fitting(units, max_tokens)]
            dealt = _dealt(branches, n := min(parts, len(branches)))
            while max(map(self.computed, dealt)) > max_tokens:
                dealt = _dealt(branches, n := n + 1)
            found += dealt
        return found

    def _full_parts(self, n_ranks: int, max_tokens: int) -> list[list[int]]:
        """Rows of equal parts, into which trees are cut one after the other: few parts, and few trees with rows in several.

        Their number is a multiple of ``n_ranks``, and no larger than needed for none to exceed ``max_tokens``, give or take a
        sixteenth.
        """
        order = sorted(self.members(), key=lambda unit: (self._root(unit[0]), self.chains[unit[0]]))
        rows = [row for unit in order for row in unit]
        shared = dict(zip(rows, repeated(rows, self.chains), strict=True))
        sizes = [sum(self.lengths[row] - shared[row] for row in unit) for unit in order]
        middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
        total, n = sum(sizes), n_ranks * -(-sum(sizes) // (n_ranks * max_tokens))
        while n < len(order):
            parts: dict[int, list[int]] = {}
            for unit, middle in zip(order, middles, strict=True):
                parts.setdefault(int(middle * n / total), []).extend(unit)
            if max(map(self.computed, parts.values())) <= max_tokens:
                return list(parts.values())
            n += n_ranks * max(1, n // (16 * n_ranks))
        return order

    def _root(self, row: int) -> int:
        """Number of the row's tree; negative if it shares nothing."""
        return self.chains[row][0][0] if self.chains[row] else ~row

    def _fitting(self, units: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Cut the units of a branch into parts of at most ``max_tokens`` computed tokens; no single unit exceeds it."""
        rows = [row for unit in units for row in unit]
        if len(units) == 1 or self.computed(rows) <= max_tokens:
            return [rows]
        parts: list[list[int]] = []
        for unit in sorted(units, key=lambda unit: self.chains[unit[0]]):  # neighbours in the tree remain together
            if parts and self.computed([*parts[-1], *unit]) <= max_tokens:
                parts[-1] += unit
            else:
                parts.append([*unit])
        return parts


def _dealt(branches: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """Rows of each of n units, to which branches are dealt in turn."""
    return [[row for branch in branches[i::n] for row in branch] for i in range(n)]


def mini_batches(
    uids: Sequence[int], n_groups: int, *, seed: int | None = None, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Rows of each mini-batch: ``n_groups`` complete prompt groups each; the last one may be smaller.

    uids, groups: data row and prompt group of each row; None: all responses to a data row are one group. Groups are in order of
    appearance or, with a seed, in an order that depends only on the seed, the uid and then the group, never on the number of
    ranks.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(uids, uids if groups is None else groups, strict=True)):
        members.setdefault(key, []).append(row)
    # Sorted by a hash of each uid: the order of two groups does not depend on which others are there.
    order = list(members) if seed is None else sorted(members, key=lambda key: (seed_of(seed, "mini_batch", key[0]), *key))
    return [
        sorted(row for key in order[start : start + n_groups] for row in members[key]) for start in range(0, len(order), n_groups)
    ]


def _even_parts(rows: Sequence[int], costs: Sequence[float], n: int) -> list[list[int]]:
    """Balance rows over ``n`` parts: largest first, each to the part with the least work so far.

    Ties go to the part with fewer rows, then to the first. rows: ascending. A heap finds the part: ``n`` may be a tenth of the
    rows, and a scan over all parts would be quadratic.
    """
    parts: list[list[int]] = [[] for _ in range(n)]
    heap = [(0.0, 0, part) for part in range(n)]  # work, number of rows, part
    for row in _largest_first(rows, costs):
        load, count, part = heap[0]
        parts[part].append(row)
        heapreplace(heap, (load + costs[row], count + 1, part))
    return [sorted(part) for part in parts]


def _largest_first(rows: Sequence[int], sizes: Sequence[float]) -> list[int]:
    """Rows by descending size; the sort is stable, so rows of equal size keep their ascending order."""
    return sorted(rows, key=sizes.__getitem__, reverse=True)


def _cut(share: Sequence[int], lengths: Sequence[int], costs: Sequence[float], limits: Limits) -> list[list[int]]:
    """Split a rank's rows into micro-batches: as few as the limits allow, balanced by work if the token limit still holds."""
    if not share:
        return [[]]
    if limits.max_rows is not None:
        n = -(-len(share) // limits.max_rows)
        by_cost = _largest_first(share, costs)  # rows of similar length together: attention pads less
        return [sorted(by_cost[i * limits.max_rows : (i + 1) * limits.max_rows]) for i in range(n)]
    assert limits.max_tokens is not None
    rows = _largest_first(share, lengths)
    homes = first_fit([lengths[row] for row in rows], limits.max_tokens)
    # Bin packing gives the number of micro-batches; balancing by work may then exceed the token limit, and the bins are used.
    even = _even_parts(share, costs, max(homes) + 1)
    if all(sum(lengths[row] for row in part) <= limits.max_tokens for part in even):
        return even
    bins: list[list[int]] = [[] for _ in even]
    for row, home in zip(rows, homes, strict=True):
        bins[home].append(row)
    return [sorted(part) for part in bins]


def first_fit(sizes: Sequence[int], room: int) -> list[int]:
    """First-fit bin packing: the bin of each size, in order. No size exceeds ``room``, the capacity of every bin.

    A tree finds the bin in O(log n): node i holds the largest free capacity of any bin below nodes 2 i and 2 i + 1; leaves are
    bins.
    """
    most = min(len(sizes), 2 * sum(sizes) // room + 1)  # enough bins: at most one is half empty or emptier
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
        # Update the maxima on the path to the root; stop where a maximum does not change.
        while node > 1 and free[node // 2] != (largest := max(free[node], free[node ^ 1])):
            node //= 2
            free[node] = largest
    return homes


def _spread(cut: list[list[int]], costs: Sequence[float], n_slots: int) -> list[list[int]]:
    """Split the same rows into ``n_slots`` micro-batches by halving the most expensive one repeatedly.

    If only single rows are left, the remaining micro-batches stay empty (a dummy row runs in their place).
    """
    parts = [list(part) for part in cut]
    while len(parts) < n_slots:
        target = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, sum(costs[row] for row in parts[i])))
        if len(parts[target]) <= 1:
            parts += [[] for _ in range(n_slots - len(parts))]
            break
        parts[target : target + 1] = _even_parts(parts[target], costs, 2)
    return parts
