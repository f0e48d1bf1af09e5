"""Answers to one prompt go through the model together, and their prompt once.

In a causal model nothing of a prompt depends on what follows it. So a group's prompt is computed once, and each of its answers
looks at the one copy of its keys: the same numbers as whole rows, to rounding, and fewer tokens through every layer
(Liu et al. 2025, "Prefix Grouper", arXiv 2506.05433; here several groups and whole rows are packed into one sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch
from workers.plan import MicroBatches, repeats


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbours among the tokens that are computed: a prompt, an answer behind a shared prompt, or a whole row.

    start: of its row, among all T tokens. before: tokens of the row that it does not hold, but looks at. length: its own.
    """

    start: int
    before: int
    length: int

    @property
    def seen(self) -> int:
        return self.before + self.length


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Which of the T tokens of B rows are computed.

    computed: int64 (C,), their places among all T. places: int64 (T,), where among those C each token finds its own.
    seen: int64 (K,), among the C, what each stretch looks at, stretches end to end.
    """

    stretches: tuple[Stretch, ...]
    computed: Tensor
    places: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], device: torch.device
    ) -> SharedPrompts | None:
        """lengths, prompts: tokens of each of the B rows and its prompt. groups: equal for equal prompts. None: all differ."""
        starts = np.cumsum([0, *lengths]).tolist()
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        if len(members) == len(groups):
            return None
        stretches = []
        for rows in members.values():
            shared = prompts[rows[0]] if len(rows) > 1 else 0
            if shared:
                stretches.append(Stretch(starts[rows[0]], 0, shared))
            stretches += [Stretch(starts[row], shared, lengths[row] - shared) for row in rows if lengths[row] > shared]
        stretches.sort(key=lambda stretch: (-stretch.seen, -stretch.length, stretch.start))  # those alike are one attention call
        computed = np.concatenate([np.arange(s.start + s.before, s.start + s.seen) for s in stretches])
        places = np.empty(starts[-1], dtype=np.int64)
        places[computed] = np.arange(len(computed))
        for first, *others in members.values():
            for row in others:
                places[starts[row] : starts[row] + prompts[row]] = places[starts[first] : starts[first] + prompts[row]]
        seen = np.concatenate([places[s.start : s.start + s.seen] for s in stretches])
        return cls(tuple(stretches), *(torch.from_numpy(x).to(device) for x in (computed, places, seen)))


@dataclass(frozen=True, slots=True)
class Prompts:
    """lengths: tokens of the prompt of each row of a batch. groups: equal for rows whose prompts are equal token by token."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> Prompts | None:
        """By rows["prompt_length"]; None where there is none."""
        if "prompt_length" not in batch.rows:
            return None
        lengths, starts = batch.rows["prompt_length"].tolist(), batch.offsets.tolist()
        ids = batch.tokens["input_ids"].numpy()
        known: dict[bytes, int] = {}
        prompts = (ids[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=False))
        return cls(tuple(lengths), tuple(known.setdefault(prompt, len(known)) for prompt in prompts))

    def shared(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> SharedPrompts | None:
        """Of a micro-batch of these rows of the batch, in this order, with so many tokens each. None: it repeats no prompt."""
        prompts, groups = ([column[row] for row in rows] for column in (self.lengths, self.groups))
        return SharedPrompts.of(lengths, prompts, groups, device)

    def repeated(self, plan: MicroBatches) -> list[int]:
        """Tokens of each prompt that its micro-batch has already."""
        return [self.lengths[row] for rows in plan for row in repeats(rows, self.groups)]
