"""Random batches whose rows begin alike: prompts with single responses, turns that are rows, rows of several turns, branches."""

import random
from collections.abc import Sequence
from itertools import chain

import torch

from tests.workers.engine.toy import toy_batch
from workers.batch import Batch

Row = tuple[int, int, int, list[int], list[int]]
"""Group, part, tokens of the prompt, token ids, and 1 for each sampled token."""


def forest(
    seed: int, *, vocabulary: int = 61, n_groups: int = 3, turns: bool = True, dtype: torch.dtype = torch.float32
) -> Batch:
    """Shuffled rows of ``n_groups`` groups. turns: False: every row is a prompt and one response, which may be empty."""
    draw = random.Random(seed)
    rows = [row for group in range(n_groups) for row in _group(draw, group, vocabulary, turns=turns)]
    draw.shuffle(rows)
    return batch_of(rows, dtype)


def batch_of(rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> Batch:
    """Columns of toy_batch, and rows group, part and prompt_length."""
    groups, parts, prompts, ids, masks = zip(*rows, strict=True)
    batch = toy_batch([len(row) for row in ids], dtype=dtype)
    mask = torch.tensor(list(chain.from_iterable(masks))) * (batch.positions() > 0)
    columns = {
        "input_ids": torch.tensor(list(chain.from_iterable(ids))),
        "response_mask": mask,
        "loss_weight": mask / mask.sum().clamp(min=1),
    }
    names = {"group": groups, "part": parts, "prompt_length": prompts}
    return batch.with_tokens(**columns).with_rows(**{name: torch.tensor(column) for name, column in names.items()})


def conversation(
    group: int, prompt: list[int], turns: Sequence[tuple[list[int], list[int]]], *, parts: bool, of_context: bool = False
) -> list[Row]:
    """A conversation of (sampled, observed) turns: a row for each turn, with all before it, or one row.

    of_context: prompt_length counts all tokens before the turn, not only the first prompt.
    """
    rows: list[Row] = []
    context, mask = [*prompt], [0] * len(prompt)
    for part, (sampled, observed) in enumerate(turns):
        if parts:
            length = len(context) if of_context else len(prompt)
            rows.append((group, part, length, [*context, *sampled], [0] * len(context) + [1] * len(sampled)))
        context, mask = [*context, *sampled, *observed], [*mask, *[1] * len(sampled), *[0] * len(observed)]
    if not parts:
        rows.append((group, 0, len(prompt), context, mask))
    return rows


def _group(draw: random.Random, group: int, vocabulary: int, *, turns: bool) -> list[Row]:
    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(least, most))]

    prompt, of_context = some(1, 7), draw.random() < 0.3
    rows: list[Row] = []
    for _ in range(draw.randint(1, 4)):
        if not turns or draw.random() < 0.2:
            rows += conversation(group, prompt, [(some(0, 6), [])], parts=False)
            continue
        spoken = [(some(1, 5), some(0, 4)) for _ in range(draw.randint(1, 4))]
        rows += conversation(group, prompt, spoken, parts=draw.random() < 0.6, of_context=of_context)
        if draw.random() < 0.5:
            # A branch after a turn or after what was observed then; only its own turns are sampled.
            kept = draw.randrange(len(spoken))
            before = [*prompt, *(token for turn in spoken[:kept] for tokens in turn for token in tokens)]
            before += spoken[kept][0] if draw.random() < 0.5 else []
            own, tail = some(1, 5), some(0, 3)
            mask = [0] * (len(before) + len(tail)) + [1] * len(own)
            rows.append((group, 1 + kept, len(prompt), [*before, *tail, *own], mask))
    if draw.random() < 0.4:
        rows.append(draw.choice(rows))  # an equal row
    return rows
