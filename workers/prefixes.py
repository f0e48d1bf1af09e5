"""Shared prefixes: rows of a batch that begin with the same tokens, as a forest.

In a causal model the hidden states of a prefix do not depend on what follows it. Rows that begin alike (responses to a prompt,
turns of a conversation that are rows of their own, branches) therefore need their common prefix only once. Each prefix that is
shared is a node, its parent the longest shorter one; a row is a chain of nodes, and the tokens after the last node are its own.

A shared prefix ends only at a boundary of turns, and not where two rows first differ: sampled responses often begin with the same
few tokens, and each further node costs a gather of all keys before it. The boundaries of a row are the ends of its prompt, of
the row, and of each run of sampled and of other tokens; a boundary holds for all rows of the group that begin with the same
tokens, because the context of a later turn does not say where earlier ones ended. In a group whose rows are a prompt and one
response, prompts alone are shared, even by equal responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch, counts_in

PREFIX_ENDS = "prefix_ends"
"""Row column, int64 (B, D): where the row's shared prefixes end, ascending; the last one is repeated up to D."""
Chain = tuple[tuple[int, int], ...]
"""Shared prefixes of a row, shortest first: (node, number of tokens from the start of the row)."""


def chains_by_group(batch: Batch) -> list[Chain]:
    """Chain of each row, from tokens input_ids and response_mask (or sampled_mask) and rows group, prompt_length and part.

    Only rows of a group share. Their prompts are assumed to be equal, except in groups that have rows of several turns: there
    tokens are compared.
    """
    lengths, starts, prompts = batch.lengths.tolist(), batch.offsets.tolist(), batch.rows["prompt_length"].tolist()
    sampled = batch.tokens.get("sampled_mask", batch.tokens["response_mask"])
    several = _has_turns(batch, sampled).tolist()
    ids, mask = batch.tokens["input_ids"].numpy(), sampled.bool().numpy()
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.rows["group"].tolist()):
        groups.setdefault(group, []).append(row)
    chains: list[Chain] = [()] * len(batch)
    nodes = count()
    for rows in groups.values():
        if not any(several[row] for row in rows):
            node = next(nodes)
            for row in rows:
                chains[row] = ((node, prompts[row]),) if prompts[row] else ()
            continue
        parts = [slice(starts[row], starts[row + 1]) for row in rows]
        changes = [(np.flatnonzero(np.diff(mask[part])) + 1).tolist() for part in parts]
        bounds = [{prompts[row], lengths[row], *inner} for row, inner in zip(rows, changes, strict=True)]
        for row, chain in zip(rows, _forest([ids[part] for part in parts], bounds, nodes), strict=True):
            chains[row] = chain
    return chains


def prefix_ends(chains: Sequence[Chain]) -> Tensor:
    """Column PREFIX_ENDS of rows with these chains."""
    depth = max((len(chain) for chain in chains), default=1) or 1
    ends = [[end for _, end in chain] for chain in chains]
    padded = [[*row, *[row[-1] if row else 0] * (depth - len(row))] for row in ends]
    return torch.tensor(padded, dtype=torch.int64).view(len(chains), depth)


def chains_by_tokens(batch: Batch) -> list[Chain] | None:
    """Chain of each row, by comparing tokens up to the ends in rows[PREFIX_ENDS]; None without the column.

    rows["prompt_length"] alone is enough where rows share no more than prompts.
    """
    if PREFIX_ENDS not in batch.rows and "prompt_length" not in batch.rows:
        return None
    ends = batch.rows[PREFIX_ENDS].tolist() if PREFIX_ENDS in batch.rows else batch.rows["prompt_length"][:, None].tolist()
    ids, starts = batch.tokens["input_ids"].numpy(), batch.offsets.tolist()
    known: dict[tuple[int, bytes], int] = {}
    chains = []
    for start, row in zip(starts, ends, strict=False):
        node, begin, chain = -1, 0, []
        for end in row:
            if end > begin:
                node = known.setdefault((node, ids[start + begin : start + end].tobytes()), len(known))
                chain.append((node, end))
                begin = end
        chains.append(tuple(chain))
    return chains


def repeated(rows: Sequence[int], chains: Sequence[Chain]) -> list[int]:
    """For each of ``rows``, the length of the prefix that it shares with the rows before it in the list."""
    known: set[int] = set()
    found = []
    for row in rows:
        length = 0
        for node, end in chains[row]:
            if node in known:
                length = end
            else:
                known.add(node)
        found.append(length)
    return found


def _has_turns(batch: Batch, sampled: Tensor) -> Tensor:
    """Whether a row has more than a prompt and one response: bool (B,).

    Either tokens after its prompt were not sampled, or it is a later part of a trajectory.
    """
    # Each row as two: its prompt, and what follows.
    prompts = batch.rows["prompt_length"]
    after_prompt = batch.lengths - prompts
    holes = counts_in(sampled, torch.stack([prompts, after_prompt], 1).flatten())[1::2] < after_prompt
    return holes | (batch.rows["part"] > 0) if "part" in batch.rows else holes


def _forest(rows: Sequence[np.ndarray], bounds: Sequence[set[int]], nodes: count[int]) -> list[Chain]:
    """Chain of each row. rows: token ids. bounds: where a prefix of the row may end. nodes: numbers for new nodes.

    In lexicographic order the rows with any given prefix are adjacent, so comparing neighbours is enough.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    common = [common_length(rows[a], rows[b]) for a, b in pairwise(order)]
    points = [bounds[row] for row in order]
    before, after = _carried(points, common), _carried(points[::-1], common[::-1])[::-1]
    # Of each pair of neighbours: the last boundary that either of them or a row with the same beginning has.
    shared = [max((end for end in before[i] | after[i + 1] if end <= most), default=0) for i, most in enumerate(common)]
    # Two rows share the minimum over the pairs between them. The ends of a row's prefixes are all such minima.
    left, right = ([set[int](), *({end} for end in ends)] for ends in (shared, shared[::-1]))
    ends = [a | b for a, b in zip(_carried(left, shared), _carried(right, shared[::-1])[::-1], strict=True)]
    chains: list[Chain] = [()] * len(rows)
    last: Chain = ()
    for row, mine, most in zip(order, ends, [0, *shared], strict=True):
        known = [pair for pair in last if pair[1] <= most]
        last = (*known, *((next(nodes), end) for end in sorted(mine) if end > most))
        chains[row] = last
    return chains


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Number of equal tokens at the start of two rows."""
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n


def _carried(points: Sequence[set[int]], common: Sequence[int]) -> list[set[int]]:
    """For each row its own points and those of rows before it, as far as all rows in between begin alike.

    common[i]: length up to which rows i and i + 1 count as alike.
    """
    known, found = set[int](), []
    for own, most in zip(points, [0, *common], strict=True):
        known = {point for point in known if point <= most} | own
        found.append(known)
    return found
