import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.workers.forests import forest
from tests.workers.test_batch import as_lists, numbered
from workers.batch import Batch
from workers.engine.shared_prefixes import SharedPrefixes
from workers.plan import EVEN, Limits, Plan, SharedRows, first_fit, make_plan, mini_batches, row_costs
from workers.prefixes import PREFIX_ENDS, chains_by_group, chains_by_tokens, prefix_ends

lengths = st.lists(st.integers(1, 300), max_size=60)
limits = st.one_of(
    st.integers(300, 1200).map(lambda n: Limits(max_tokens=n)), st.integers(1, 9).map(lambda n: Limits(max_rows=n))
)


@given(lengths, st.integers(1, 5), limits)
def test_every_row_is_in_one_slot_under_the_cap_and_ranks_run_equal_counts(sizes: list[int], n_ranks: int, limit: Limits) -> None:
    plan = make_plan(sizes, n_ranks, limit, attention_cost=1e-3)
    assert sorted(row for share in plan.shards for row in share) == list(range(len(sizes)))
    assert len({len(cut) for cut in plan.micro_batches}) == 1
    for share, cut in zip(plan.shards, plan.micro_batches, strict=True):
        assert sorted(i for part in cut for i in part) == list(range(len(share)))
        for part in cut:
            assert limit.max_rows is None or len(part) <= limit.max_rows
            assert limit.max_tokens is None or sum(sizes[share[i]] for i in part) <= limit.max_tokens


@given(lengths, st.integers(1, 5), limits)
def test_collect_undoes_split(sizes: list[int], n_ranks: int, limit: Limits) -> None:
    batch = numbered(sizes or [1])
    plan = make_plan(batch.lengths.tolist(), n_ranks, limit)
    assert as_lists(plan.collect(plan.split(batch))) == as_lists(batch)


def test_single_rank_gets_the_batch_itself() -> None:
    batch = numbered([3, 1, 2])
    plan = make_plan([3, 1, 2], 1, Limits(max_rows=2))
    assert plan.shards == ((0, 1, 2),)
    (share,) = plan.split(batch)
    assert share is batch
    turned = Plan(shards=((2, 0, 1),), micro_batches=(((0, 1, 2),),))
    (share,) = turned.split(batch)
    assert share.lengths.tolist() == [2, 3, 1] and as_lists(turned.collect([share])) == as_lists(batch)


@given(st.lists(st.integers(1, 300), min_size=40, max_size=80), st.integers(2, 4))
def test_costs_of_ranks_are_balanced(sizes: list[int], n_ranks: int) -> None:
    """Largest first differs from an even split by at most one row."""
    costs = row_costs(sizes, 1e-3)
    plan = make_plan(sizes, n_ranks, Limits(max_rows=4), attention_cost=1e-3)
    loads = [sum(costs[row] for row in share) for share in plan.shards]
    assert max(loads) - min(loads) <= max(costs)


@example([5, 4, 3, 1, 1, 1], 2, 0.0)  # 5 + 1 + 1 and 4 + 3
@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 6), st.sampled_from([0.0, 1e-3]))
def test_ranks_are_filled_largest_first_by_the_least_loaded(sizes: list[int], n_ranks: int, attention_cost: float) -> None:
    """Reference: every row is compared with every rank. Among ranks of equal load, the one with fewer rows gets it."""
    costs = row_costs(sizes, attention_cost)
    parts: list[list[int]] = [[] for _ in range(n_ranks)]
    for row in sorted(range(len(sizes)), key=lambda row: (-costs[row], row)):
        min(parts, key=lambda part: (sum(costs[i] for i in part), len(part))).append(row)
    plan = make_plan(sizes, n_ranks, Limits(max_rows=100), attention_cost=attention_cost)
    assert plan.shards == tuple(tuple(sorted(part)) for part in parts)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.integers(100, 300), st.booleans())
def test_first_fit_is_the_first_that_fits(sizes: list[int], room: int, descending: bool) -> None:
    sizes = sorted(sizes, reverse=True) if descending else sizes
    free: list[int] = []
    for size, home in zip(sizes, first_fit(sizes, room), strict=True):
        assert home == next((i for i, left in enumerate(free) if left >= size), len(free))
        free += [room] * (home == len(free))
        free[home] -= size


def test_time_of_a_plan_is_linear_in_its_rows() -> None:
    """Four times the rows, four times as many micro-batches: sixteen times the time if each row is compared with each of them."""

    def best(n: int) -> float:
        sizes = [20 + 37 * i % 121 for i in range(n)]
        times = []
        for _ in range(5):
            start = time.process_time()
            make_plan(sizes, 1, Limits(max_tokens=2048), attention_cost=1e-3)
            times.append(time.process_time() - start)
        return min(times)

    assert best(8192) < 8 * best(2048)


def test_micro_batch_of_a_long_row_has_fewer_rows() -> None:
    plan = make_plan([100, *[1] * 60], 2, Limits(max_rows=100))
    assert sorted(map(len, plan.shards)) == [1, 60]


def test_row_over_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 301 tokens, the micro-batch budget is 300"):
        make_plan([10, 301], 1, Limits(max_tokens=300))


uids = st.lists(st.integers(0, 20), min_size=1, max_size=60)


@given(uids, st.integers(1, 7), st.one_of(st.none(), st.integers(0, 99)))
def test_mini_batches_have_complete_groups_and_each_row_once(rows: list[int], n_groups: int, seed: int | None) -> None:
    parts = mini_batches(rows, n_groups, seed=seed)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    homes = [{rows[row] for row in part} for part in parts]
    assert all(len(home) == n_groups for home in homes[:-1]) and len(homes[-1]) <= n_groups
    assert sum(len(home) for home in homes) == len(set(rows))


@given(st.permutations(list(range(24))), st.integers(0, 99))
def test_shuffled_mini_batches_depend_only_on_seed_and_uid(order: list[int], seed: int) -> None:
    """Rows in another order: the same groups are in each mini-batch."""
    plain = {frozenset(part) for part in mini_batches(list(range(24)), 4, seed=seed)}
    moved = {frozenset(order[row] for row in part) for part in mini_batches(order, 4, seed=seed)}
    assert plain == moved


@given(st.integers(0, 99), st.integers(1, 4))
def test_mini_batch_order_depends_on_the_group_only_where_uids_are_equal(seed: int, n_groups: int) -> None:
    uids, groups = [5, 5, 3, 3, 9, 9, 3, 3], [12, 12, 11, 11, 10, 10, 13, 13]
    parts = mini_batches(uids, n_groups, seed=seed, groups=groups)
    singles = mini_batches(uids, 1, seed=seed, groups=groups)
    assert sorted(map(tuple, singles)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert singles.index([2, 3]) + 1 == singles.index([6, 7])
    by_uid = [uids[part[0]] for part in mini_batches(uids, 1, seed=seed)]
    assert list(dict.fromkeys(uids[part[0]] for part in singles)) == by_uid
    assert parts == [sorted(row for single in singles[i : i + n_groups] for row in single) for i in range(0, 4, n_groups)]


def test_unshuffled_mini_batches_follow_the_batch() -> None:
    assert mini_batches([5, 5, 3, 3, 9, 9], 2) == [[0, 1, 2, 3], [4, 5]]
    assert mini_batches(torch.tensor([5, 3, 5]).tolist(), 1) == [[0, 2], [1]]


@given(st.lists(st.integers(1, 150), min_size=1, max_size=30), st.integers(1, 5), limits, st.integers(1, 3))
def test_rows_of_a_unit_stay_together(sizes: list[int], n_ranks: int, limit: Limits, n: int) -> None:
    units = make_plan(sizes, n_ranks, limit)
    plan = units.of_rows([range(i * n, (i + 1) * n) for i in range(len(sizes))])
    assert sorted(row for share in plan.shards for row in share) == list(range(n * len(sizes)))
    assert [[len(part) for part in cut] for cut in plan.micro_batches] == [
        [n * len(p) for p in cut] for cut in units.micro_batches
    ]
    for share, cut, of_units, cut_units in zip(plan.shards, plan.micro_batches, units.shards, units.micro_batches, strict=True):
        for part, chosen in zip(cut, cut_units, strict=True):
            rows = [share[i] for i in part]
            assert rows == [of_units[i] * n + k for i in chosen for k in range(n)]


groups_of_rows = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 60), min_size=1, max_size=8)), min_size=1, max_size=12
)


def shared_rows(groups: list[tuple[int, list[int]]]) -> SharedRows:
    """groups: (prompt, responses), in tokens."""
    rows = [
        (prompt + answer, ((group, prompt),) if prompt else ())
        for group, (prompt, answers) in enumerate(groups)
        for answer in answers
    ]
    return SharedRows(*zip(*rows, strict=True))


@given(groups_of_rows, st.integers(1, 5), st.integers(100, 400))
def test_shared_rows_are_each_in_one_slot_with_computed_tokens_under_the_cap(
    groups: list[tuple[int, list[int]]], n_ranks: int, cap: int
) -> None:
    rows = shared_rows(groups)
    plan = rows.plan(n_ranks, Limits(max_tokens=cap), attention_cost=1e-3)
    assert sorted(row for share in plan.shards for row in share) == list(range(len(rows.lengths)))
    assert len({len(cut) for cut in plan.micro_batches}) == 1
    for share, cut in zip(plan.shards, plan.micro_batches, strict=True):
        assert sorted(i for part in cut for i in part) == list(range(len(share)))
    assert all(tokens <= cap for _, tokens in rows.sizes(plan))


@given(groups_of_rows, st.integers(1, 5), st.integers(100, 400))
def test_sharing_never_raises_the_maximum_cost_of_a_rank(groups: list[tuple[int, list[int]]], n_ranks: int, cap: int) -> None:
    rows, limits = shared_rows(groups), Limits(max_tokens=cap)
    plans = rows.plan(n_ranks, limits, attention_cost=1e-3), make_plan(rows.lengths, n_ranks, limits, attention_cost=1e-3)
    actual, plain = (max(sum(rows.cost(part, 1e-3) for part in cut) for cut in plan.rows_by_rank()) for plan in plans)
    assert actual <= EVEN * plain


def test_shared_row_over_the_limit_is_refused() -> None:
    rows = shared_rows([(100, [10, 201])])
    with pytest.raises(ValueError, match=r"row 1 has 301 tokens, the micro-batch budget is 300"):
        rows.plan(1, Limits(max_tokens=300))


def test_groups_stay_on_one_rank_unless_halves_are_even() -> None:
    rows = shared_rows([(100, [10] * 4)] * 2)
    together = rows.plan(1, Limits(max_tokens=140))
    assert sorted(sorted(part) for part in together.rows_by_rank()[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(map(sorted, rows.plan(2, Limits(max_tokens=280)).shards)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    quarters = rows.plan(4, Limits(max_tokens=280))
    assert [len({row // 4 for row in share}) for share in quarters.shards] == [1] * 4
    assert {tokens for _, tokens in rows.sizes(quarters)} == {120}


@pytest.mark.parametrize(("prompt", "n_parts", "again"), [(256, 18, 16), (1024, 32, 0)])
def test_trees_are_cut_where_that_fills_micro_batches(prompt: int, n_parts: int, again: int) -> None:
    """A tree of 256 + 8 x 1,024 tokens takes half of a micro-batch and a little more. Longer prompts cost too much to repeat."""
    rows, limits = shared_rows([(prompt, [1024] * 8)] * 32), Limits(max_tokens=16384)
    sizes = rows.sizes(rows.plan(1, limits))
    assert len(sizes) == n_parts
    assert sum(tokens for _, tokens in sizes) == 32 * (prompt + 8 * 1024) + again * prompt


@given(groups_of_rows, st.integers(1, 5), st.integers(100, 400))
def test_full_parts_have_every_row_under_the_cap(groups: list[tuple[int, list[int]]], n_ranks: int, cap: int) -> None:
    rows = shared_rows(groups)
    parts = rows._full_parts(n_ranks, cap)
    assert sorted(row for part in parts for row in part) == list(range(len(rows.lengths)))
    assert max(map(rows.computed, parts)) <= cap
    # Each tree begins in the part in which the one before it ended.
    homes = [part for part, members in enumerate(parts) for _ in {rows._root(row) for row in members}]
    assert len(homes) <= len({rows._root(row) for row in range(len(rows.lengths))}) + len(parts) - 1


units_of_rows = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=4)),
    min_size=1, max_size=8,
)  # fmt: skip


def with_units(groups: list[tuple[int, list[list[int]]]], *, shares: bool, seed: int) -> SharedRows:
    """groups: (prompt, responses in tokens of each unit). Rows are in a random order."""
    rows, unit = [], 0
    for group, (prompt, units) in enumerate(groups):
        for answers in units:
            rows += [(prompt + answer, ((group, prompt),) if shares and prompt else (), unit) for answer in answers]
            unit += 1
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return SharedRows(*zip(*(rows[i] for i in order), strict=True))


@given(units_of_rows, st.integers(1, 5), st.one_of(st.integers(100, 400), st.none()), st.booleans(), st.integers(0, 9))
def test_units_are_in_one_micro_batch_of_one_rank(
    groups: list[tuple[int, list[list[int]]]], n_ranks: int, cap: int | None, shares: bool, seed: int
) -> None:
    """A limit in rows counts units."""
    rows = with_units(groups, shares=shares, seed=seed)
    largest = max(rows.computed(unit) for unit in rows.members())
    limits = Limits(max_rows=2) if cap is None else Limits(max_tokens=max(cap, largest))
    plan = rows.plan(n_ranks, limits, attention_cost=1e-3)
    assert rows.units is not None
    cuts = [part for cut in plan.rows_by_rank() for part in cut]
    homes = {row: number for number, part in enumerate(cuts) for row in part}
    assert sorted(homes) == list(range(len(rows.lengths))) and sum(map(len, cuts)) == len(homes)
    assert all(len({homes[row] for row in unit}) == 1 for unit in rows.members())
    assert len({len(cut) for cut in plan.micro_batches}) == 1
    for part, (n_units, tokens) in zip(cuts, rows.sizes(plan), strict=True):
        assert n_units == len({rows.units[row] for row in part}) and tokens == rows.computed(part)
        assert tokens <= (limits.max_tokens or tokens) and n_units <= (limits.max_rows or n_units)


@given(groups_of_rows, st.integers(1, 4), st.integers(100, 400))
def test_units_of_one_row_are_planned_as_rows(groups: list[tuple[int, list[int]]], n_ranks: int, cap: int) -> None:
    rows, limits = shared_rows(groups), Limits(max_tokens=cap)
    alone = replace(rows, units=range(len(rows.lengths)))
    assert alone.plan(n_ranks, limits, attention_cost=1e-3) == rows.plan(n_ranks, limits, attention_cost=1e-3)
    assert alone.unit_tokens() == rows.unit_tokens() == list(rows.lengths)


def test_unit_over_the_limit_is_refused_with_the_tokens_of_its_parts() -> None:
    rows = SharedRows([90, 20, 120], [(), (), ()], [7, 8, 7])
    with pytest.raises(ValueError, match=r"^rows 0, 2 of one .* have 90 \+ 120 = 210 tokens, .* is 200: raise .* at least 210$"):
        rows.plan(2, Limits(max_tokens=200))
    assert sorted(map(len, rows.plan(2, Limits(max_tokens=210)).shards)) == [1, 2]
    shared = replace(rows, chains=[((0, 50),), (), ((0, 50),)])
    with pytest.raises(ValueError, match=r"have 90 \+ 120 - 50 shared = 160 tokens"):
        shared.plan(2, Limits(max_tokens=150))
    assert replace(rows, units=None).plan(2, Limits(max_tokens=120)), "rows of their own fit"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 9))
def test_rows_of_a_trajectory_share_a_mini_batch(rows: list[tuple[int, int]], n_groups: int, seed: int) -> None:
    """A trajectory is in one group, whose rows are never separated. rows: (group, trajectory of the group)."""
    parts = mini_batches([group % 3 for group, _ in rows], n_groups, seed=seed, groups=[group for group, _ in rows])
    homes = [{rows[row] for row in part} for part in parts]
    assert sum(map(len, homes)) == len(set(rows))


def test_number_of_computed_tokens() -> None:
    rows = SharedRows([15, 12, 11, 9], [((7, 10),), ((7, 10),), ((5, 3),), ((4, 3),)])
    assert [rows.computed(part) for part in ([0, 1], [2, 3], [0, 1, 2, 3], [], [1])] == [17, 20, 37, 0, 12]
    assert rows.cost([0, 1], 0.5) == 15 + 12 - 10 + 0.5 * (225 + 144 - 100)


@pytest.mark.parametrize("seed", range(30))
def test_forests_are_planned_under_the_cap_in_the_tokens_that_engines_compute(seed: int) -> None:
    batch = forest(seed, vocabulary=3, n_groups=8)
    chains = chains_by_group(batch)
    rows, limit = SharedRows(batch.lengths.tolist(), chains), int(batch.lengths.max()) + seed
    needed = Batch(batch.lengths, batch.tokens, {PREFIX_ENDS: prefix_ends(chains)})
    for n_ranks in (1, 3):
        plan = rows.plan(n_ranks, Limits(max_tokens=limit), attention_cost=1e-3)
        assert sorted(row for share in plan.shards for row in share) == list(range(len(batch)))
        assert len({len(cut) for cut in plan.micro_batches}) == 1
        for share, cut in zip(plan.split(needed), plan.micro_batches, strict=True):
            found = chains_by_tokens(share)
            assert found is not None
            for part in filter(None, cut):
                lengths = share.lengths[list(part)].tolist()
                shared = SharedPrefixes.of(lengths, [found[row] for row in part], torch.device("cpu"))
                assert (sum(lengths) if shared is None else len(shared.computed)) <= limit
        single = make_plan(rows.lengths, n_ranks, Limits(max_tokens=limit), attention_cost=1e-3)
        actual, plain = (max(sum(rows.cost(part, 1e-3) for part in cut) for cut in p.rows_by_rank()) for p in (plan, single))
        assert actual <= EVEN * plain


@pytest.mark.parametrize("seed", range(20))
def test_units_of_forests_stay_together_under_the_cap(seed: int) -> None:
    """Of turns of a conversation, and of rows that share nothing."""
    batch = forest(seed, vocabulary=3, n_groups=8)
    numbers = random.Random(seed)
    rows = SharedRows(batch.lengths.tolist(), chains_by_group(batch), [numbers.randrange(len(batch) // 2) for _ in batch.lengths])
    limit = max(rows.unit_tokens()) + seed
    for n_ranks in (1, 3):
        plan = rows.plan(n_ranks, Limits(max_tokens=limit), attention_cost=1e-3)
        cuts = [part for cut in plan.rows_by_rank() for part in cut]
        assert sorted(row for part in cuts for row in part) == list(range(len(batch)))
        assert all(any(set(unit) <= set(part) for part in cuts) for unit in rows.members())
        assert max(rows.computed(part) for part in cuts) <= limit


def test_a_tree_is_cut_between_its_branches() -> None:
    """Two prompts of 100 tokens, each with three conversations of four turns of 10 tokens that are rows."""
    chains, lengths = [], []
    for tree in range(2):
        for branch in range(3):
            nodes = [(1000 * tree, 100), *((1000 * tree + 10 * branch + turn, 100 + 10 * turn) for turn in range(1, 4))]
            chains += [tuple(nodes[: turn + 1]) for turn in range(1, 4)] + [tuple(nodes)]
            lengths += [110, 120, 130, 140]
    rows = SharedRows(lengths, chains)
    assert sorted(rows.sizes(rows.plan(2, Limits(max_tokens=220)))) == [(12, 220), (12, 220)]
    thirds = rows.plan(6, Limits(max_tokens=220))
    assert rows.sizes(thirds) == [(4, 140)] * 6
    assert sorted(map(sorted, thirds.shards)) == [list(range(first, first + 4)) for first in range(0, 24, 4)]


def test_a_branch_over_the_limit_is_cut_between_rows_that_share_most() -> None:
    """After two tokens and one more three rows of 10 tokens and a pair of 10, which shares 8 of them."""
    one, pair = ((0, 2), (1, 3)), ((0, 2), (1, 3), (2, 8))
    chains = [one, pair, one, pair, one, ((0, 2),)]
    rows = SharedRows([10, 10, 10, 10, 10, 3], chains)
    plan = rows.plan(1, Limits(max_tokens=20))
    assert max(tokens for _, tokens in rows.sizes(plan)) <= 20
    assert any({1, 3} <= set(part) for part in plan.rows_by_rank()[0])


@given(groups_of_rows, st.integers(1, 8), st.integers(101, 200))
def test_parts_of_prompts_are_their_rows_dealt_out_by_length(groups: list[tuple[int, list[int]]], parts: int, cap: int) -> None:
    groups = [(prompt + 1, answers) for prompt, answers in groups]
    rows, expected, first = shared_rows(groups), {}, 0
    for prompt, answers in groups:
        members = sorted(range(first, first + len(answers)), key=lambda row: (-rows.lengths[row], row))
        first += len(answers)
        n = min(parts, len(members))
        while any(prompt + sum(rows.lengths[row] - prompt for row in members[i::n]) > cap for i in range(n)):
            n += 1
        expected[min(-rows.lengths[row] for row in members), min(members)] = [members[i::n] for i in range(n)]
    order = sorted(expected, key=lambda key: (key[0], key[1]))
    assert rows._parts_of_trees(parts, cap) == [unit for key in order for unit in expected[key]]
