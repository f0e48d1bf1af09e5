"""Prompt sharing: responses to one prompt run through the model together, and their prompt only once.

In a causal model the hidden states of a prompt do not depend on what follows it. A group's prompt is therefore computed once, and
each of its responses attends to the one copy of the prompt's keys and values. The result equals that of complete rows up to
rounding, with fewer tokens in every layer (Liu et al. 2025, "Prefix Grouper", arXiv 2506.05433; here several groups and complete
rows are packed into one sequence). The cost is index arithmetic per micro-batch, and a gather of keys and values in each layer.
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
    """A contiguous run of computed tokens: a prompt, a response after a shared prompt, or a complete row.

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
class SharedPrompts:
    """Indices that map B rows with T tokens to the C <= T tokens that are computed.

    computed: int64 (C,), indices of the computed tokens among all T. places: int64 (T,), for each token the index of its computed
    copy among those C. seen: int64 (K,), indices among the C of the keys of each stretch, stretches concatenated.
    """

    stretches: tuple[Stretch, ...]
    computed: Tensor
    places: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], device: torch.device
    ) -> SharedPrompts | None:
        """Build the mapping for one micro-batch; None if all prompts differ.

        lengths, prompts: tokens of each of the B rows and of its prompt. groups: equal for equal prompts.
        """
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
        stretches.sort(key=lambda stretch: (-stretch.seen, -stretch.length, stretch.start))  # equal shapes: one attention call
        computed = np.concatenate([np.arange(s.start + s.before, s.start + s.seen) for s in stretches])
        places = np.empty(starts[-1], dtype=np.int64)
        places[computed] = np.arange(len(computed))
        # Prompt tokens of the other rows of a group refer to the copy in its first row.
        for first, *others in members.values():
            for row in others:
                places[starts[row] : starts[row] + prompts[row]] = places[starts[first] : starts[first] + prompts[row]]
        seen = np.concatenate([places[s.start : s.start + s.seen] for s in stretches])
        return cls(tuple(stretches), *(torch.from_numpy(x).to(device) for x in (computed, places, seen)))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a batch. lengths: tokens of each row's prompt. groups: equal for rows whose prompts are equal token by token."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> Prompts | None:
        """Group rows by the tokens of their prompts, given by rows["prompt_length"]; None without that column."""
        if "prompt_length" not in batch.rows:
            return None
        lengths, starts = batch.rows["prompt_length"].tolist(), batch.offsets.tolist()
        ids = batch.tokens["input_ids"].numpy()
        known: dict[bytes, int] = {}
        prompts = (ids[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=False))
        return cls(tuple(lengths), tuple(known.setdefault(prompt, len(known)) for prompt in prompts))

    def shared(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> SharedPrompts | None:
        """Mapping for a micro-batch of these rows, in this order, of these lengths; None if no prompt occurs twice."""
        prompts, groups = ([column[row] for row in rows] for column in (self.lengths, self.groups))
        return SharedPrompts.of(lengths, prompts, groups, device)

    def repeated(self, plan: MicroBatches) -> list[int]:
        """Lengths of the prompts that an earlier row of the same micro-batch computes already."""
        return [self.lengths[row] for rows in plan for row in repeats(rows, self.groups)]
