"""Groups in flight: prompts that were drawn and whose responses are generated, over one step or several.

Partial rollouts leave long responses unfinished at the end of a step; they continue in the next one with newer weights. Which
groups a step takes depends on nothing but ticks and ordinals, so it is the same from run to run. No group is dropped: it is
taken once, or it is here, and a checkpoint holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.data.dataset import Prompt
from workers.batch import Batch

COLUMNS = {"input_ids": torch.int64, "rollout_log_probs": torch.float32, "weight_version": torch.int32}


@dataclass(slots=True)
class PendingResponse:
    """A response so far. parts: by column, what each call has added. finished: 1: terminated, 0: truncated, None: neither."""

    seed: int
    greedy: bool
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    finished: int | None = None

    def column(self, name: str) -> Tensor:
        """All tokens so far (L,)."""
        return torch.cat(self.parts[name]) if self.parts[name] else torch.zeros(0, dtype=COLUMNS[name])


@dataclass(slots=True)
class PendingGroup:
    """A prompt with its responses. ordinal: number of the prompt in the run. step: that of its admission. tick: at which its last
    response ended; None: it is unfinished.
    """

    ordinal: int
    step: int
    prompt: Prompt
    responses: list[PendingResponse]
    tick: int | None = None


class GroupBuffer:
    """All groups in flight. Requests have the id ordinal * n + sample. n: responses per group."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._groups: dict[int, PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, ordinal: int, step: int, prompt: Prompt, seeds: Sequence[int], greedy: Sequence[bool]) -> list[int]:
        """Add a group; returns the ids of its requests."""
        responses = [PendingResponse(*one) for one in zip(seeds, greedy, strict=True)]
        if len(responses) != self.n or ordinal in self._groups:
            raise ValueError(f"group {ordinal}: {len(responses)} of {self.n} responses, or in flight already")
        self._groups[ordinal] = PendingGroup(ordinal, step, prompt, responses)
        return [ordinal * self.n + sample for sample in range(self.n)]

    def requests(self, ids: Sequence[int]) -> Batch:
        """Rollout requests with what their responses have so far; see RolloutRole.advance."""
        rows = [(self._groups[id // self.n].prompt, self._response(id)) for id in ids]
        begun = [response.column("input_ids") for _, response in rows]
        whole = [torch.cat([torch.tensor(prompt.prompt_ids), tail]) for (prompt, _), tail in zip(rows, begun, strict=True)]
        return Batch(
            lengths=torch.tensor([len(row) for row in whole], dtype=torch.int64),
            tokens={"input_ids": torch.cat(whole) if whole else torch.zeros(0, dtype=torch.int64)},
            rows={
                "id": torch.tensor(ids, dtype=torch.int64),
                "seed": torch.tensor([response.seed for _, response in rows], dtype=torch.int64),
                "greedy": torch.tensor([response.greedy for _, response in rows], dtype=torch.bool),
                "begun": torch.tensor([len(tail) for tail in begun], dtype=torch.int64),
            },
        )

    def add(self, sampled: Batch, tick: int | None) -> None:
        """Append sampled tokens to their responses. tick: at which these responses ended; None: they were interrupted."""
        columns = {name: sampled.split_rows(name) for name in COLUMNS}
        for row, id in enumerate(sampled.rows["id"].tolist()):
            response, group = self._response(id), self._groups[id // self.n]
            for name, parts in response.parts.items():
                parts.append(columns[name][row])
            if tick is not None:
                response.finished = int(sampled.rows["finished"][row])
                if all(other.finished is not None for other in group.responses):
                    group.tick = tick

    def unfinished(self) -> list[int]:
        """Ids of the requests whose responses have not ended, in order."""
        return [
            ordinal * self.n + sample
            for ordinal, group in sorted(self._groups.items())
            for sample, response in enumerate(group.responses)
            if response.finished is None
        ]

    def may_take(self, count: int, step: int, max_age: int) -> bool:
        """Whether ``count`` groups are complete and no group admitted ``max_age`` steps ago or earlier is unfinished."""
        complete = [group for group in self._groups.values() if group.tick is not None]
        late = any(group.tick is None and step - group.step >= max_age for group in self._groups.values())
        return len(complete) >= count and not late

    def take(self, count: int) -> list[PendingGroup]:
        """Remove the first ``count`` complete groups by (tick, ordinal); returns them by ordinal."""
        complete = [(group.tick, ordinal) for ordinal, group in self._groups.items() if group.tick is not None]
        return [self._groups.pop(ordinal) for ordinal in sorted(ordinal for _, ordinal in sorted(complete)[:count])]

    def _response(self, id: int) -> PendingResponse:
        return self._groups[id // self.n].responses[id % self.n]
