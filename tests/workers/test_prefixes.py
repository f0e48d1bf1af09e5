"""The forest of shared prefixes, against pairwise comparisons of rows."""

import time
from itertools import pairwise

import pytest
import torch

from tests.workers.forests import batch_of, conversation, forest
from workers.batch import Batch
from workers.prefixes import PREFIX_ENDS, Chain, chains_by_group, chains_by_tokens, prefix_ends, repeated

SMALL = 3
"""Token ids: so few that sampled responses often begin alike."""


def plain_shares(batch: Batch) -> list[list[int]]:
    """For each pair of rows the tokens that they share, by the rule in workers/prefixes.py, tried on every pair and position."""
    ids = [row.tolist() for row in batch.split_rows("input_ids")]
    masks = [row.tolist() for row in batch.split_rows("response_mask")]
    groups, prompts, parts = (batch.rows[name].tolist() for name in ("group", "prompt_length", "part"))
    rows = range(len(batch))
    turns = {g for g, part, mask, prompt in zip(groups, parts, masks, prompts, strict=True) if part or 0 in mask[prompt:]}
    own = [
        {prompts[row], len(ids[row]), *(i + 1 for i, (a, b) in enumerate(pairwise(masks[row])) if a != b)}
        if groups[row] in turns
        else {prompts[row]}
        for row in rows
    ]

    def share(one: int, other: int) -> int:
        if groups[one] != groups[other]:
            return 0
        same = [end for end in range(len(ids[one]) + 1) if ids[one][:end] == ids[other][:end] and end <= len(ids[other])]
        mates = [row for row in rows if groups[row] == groups[one]]
        return max(end for end in same if end == 0 or any(end in own[row] and ids[row][:end] == ids[one][:end] for row in mates))

    return [[share(one, other) for other in rows] for one in rows]


def shares_of(chains: list[Chain]) -> list[list[int]]:
    """The longest prefix that each pair of chains has in common."""
    return [[max([end for node, end in one if (node, end) in other], default=0) for other in chains] for one in chains]


def off_diagonal(shares: list[list[int]]) -> list[list[int]]:
    return [[*row[:i], *row[i + 1 :]] for i, row in enumerate(shares)]


@pytest.mark.parametrize("seed", range(60))
def test_rows_share_what_the_rule_allows_and_workers_find_the_same(seed: int) -> None:
    batch = forest(seed, vocabulary=SMALL)
    chains = chains_by_group(batch)
    expected = off_diagonal(plain_shares(batch))
    assert off_diagonal(shares_of(chains)) == expected
    asked = Batch(batch.lengths, batch.tokens, {PREFIX_ENDS: prefix_ends(chains)})
    found = chains_by_tokens(asked)
    assert found is not None
    same_group = batch.rows["group"][:, None] == batch.rows["group"]
    # Workers do not know the groups: prompts of two groups that are equal are shared too.
    for mine, others, together in zip(shares_of(found), shares_of(chains), same_group.tolist(), strict=True):
        assert all(a == b if is_group else a >= b for a, b, is_group in zip(mine, others, together, strict=True))
    assert [[end for _, end in chain] for chain in found] == [[end for _, end in chain] for chain in chains]


@pytest.mark.parametrize("seed", range(20))
def test_repeated_tokens_are_those_of_the_closest_row_before(seed: int) -> None:
    batch = forest(seed, vocabulary=SMALL)
    shares, chains = plain_shares(batch), chains_by_group(batch)
    for rows in (list(range(len(batch))), list(range(len(batch)))[::-1], list(range(0, len(batch), 2))):
        assert repeated(rows, chains) == [
            max([shares[row][other] for other in rows[:i]], default=0) for i, row in enumerate(rows)
        ]


def test_a_conversation_of_four_rows_is_computed_once() -> None:
    spoken = [([1, 2], [3]), ([4], [5, 6]), ([7, 8, 9], []), ([1, 1], [])]
    rows = conversation(0, [9, 9, 9], spoken, parts=True)
    batch = batch_of(rows)
    assert sum(batch.lengths.tolist()) - sum(repeated(range(4), chains_by_group(batch))) == int(batch.lengths.max())


@pytest.mark.parametrize("of_context", [False, True])
def test_eight_conversations_share_their_prompt_and_no_more(of_context: bool) -> None:
    """All first responses begin with the same token."""
    rows = []
    for sample in range(8):
        spoken = [([7, 10 + sample], [3]), ([7, 20 + sample], [])]
        rows += conversation(0, [9, 9, 9], spoken, parts=True, of_context=of_context)
    batch = batch_of(rows)
    chains = chains_by_group(batch)
    assert {chain[0] for chain in chains} == {(chains[0][0][0], 3)} and {len(chain) for chain in chains} == {2}
    assert sum(batch.lengths.tolist()) - sum(repeated(range(16), chains)) == 3 + 8 * (2 + 1 + 2)


def test_branches_share_the_turns_before_them() -> None:
    trunk = conversation(0, [9, 9], [([1, 2], [3]), ([4, 5], [6]), ([7, 7], [])], parts=False)
    branch = (0, 1, 2, [9, 9, 1, 2, 3, 4, 5, 6, 7, 8], [0] * 8 + [1, 1])
    observed = (0, 2, 2, [9, 9, 1, 2, 3, 4, 5, 8, 8], [0] * 8 + [1])
    chains = chains_by_group(batch_of([*trunk, branch, observed]))
    assert off_diagonal(shares_of(chains)) == [[8, 7], [8, 7], [7, 7]], "not the token that both turns begin with"


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_single_responses_share_prompts_alone_whatever_is_masked(seed: int) -> None:
    """Rejected tokens leave holes in response_mask; sampled_mask has what was sampled."""
    batch = forest(seed, vocabulary=2, turns=False)
    lengths, prompts, groups = batch.lengths.tolist(), batch.rows["prompt_length"].tolist(), batch.rows["group"].tolist()
    holes = batch.tokens["response_mask"] * (torch.arange(batch.total_tokens) % 3 > 0)
    batch = batch.with_tokens(sampled_mask=batch.tokens["response_mask"], response_mask=holes)
    order = list(dict.fromkeys(groups))
    assert chains_by_group(batch) == [((order.index(group), prompt),) for group, prompt in zip(groups, prompts, strict=True)]
    assert torch.equal(prefix_ends(chains_by_group(batch))[:, 0], batch.rows["prompt_length"])
    assert any(lengths.count(n) > 1 for n in lengths)


def test_ends_of_rows_that_share_nothing() -> None:
    assert prefix_ends([(), ((0, 3), (1, 5)), ((0, 3),)]).tolist() == [[0, 0], [3, 5], [3, 3]]
    assert prefix_ends([(), ()]).tolist() == [[0], [0]] and prefix_ends([]).shape == (0, 1)
    batch = batch_of([(0, 0, 0, [1, 2], [0, 1]), (1, 0, 0, [1, 2], [0, 1])])
    assert chains_by_group(batch) == [(), ()] and chains_by_tokens(batch) == [(), ()]


def test_time_is_linear_in_the_turns() -> None:
    """Two hundred turns of one conversation: pairs of rows would be twenty thousand."""

    def seconds(n: int) -> float:
        batch = batch_of(conversation(0, [1, 2], [([turn % 61], []) for turn in range(n)], parts=True))
        start = time.process_time()
        chains_by_group(batch)
        return time.process_time() - start

    assert min(seconds(200) for _ in range(3)) < 0.2


def test_equal_tokens_after_other_prefixes_are_not_shared() -> None:
    rows = [(0, 0, 2, [1, 2, 7, 7, 3], [0, 0, 1, 1, 1]), (1, 0, 2, [5, 2, 7, 7, 3], [0, 0, 1, 1, 1])]
    found = chains_by_tokens(batch_of(rows).with_rows(**{PREFIX_ENDS: torch.tensor([[2, 4], [2, 4]])}))
    assert found is not None and shares_of(found)[0][1] == 0
