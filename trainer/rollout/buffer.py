"""Groups in flight: prompts that were drawn and whose responses are generated, over one step or several.

Partial rollouts leave long responses unfinished at the end of a step; they continue in the next one with newer weights. Which
groups a step takes depends on nothing but ticks and ordinals, so it is the same from run to run. No group is dropped: it is
taken once, or it is here, and a checkpoint holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.agents.sessions.saved_sessions import pack, restore, unpack_rows
from trainer.agents.sessions.session_flow import COLUMNS, AgentSessions, Session, requests
from trainer.data.dataset import Prompt
from workers.batch import Batch


@dataclass(slots=True)
class PendingResponse:
    """A response so far. parts: by column, what each call has added. finished: 1: terminated, 0: truncated, None: neither.

    text: of a response that ended in the call that began it, if replicas decode; otherwise the controller does. session: of an
    agent; rows: its rows when it has finished. Both replace parts.
    """

    seed: int
    greedy: bool
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    finished: int | None = None
    text: str | None = None
    session: Session | None = None
    rows: Batch | None = None

    def column(self, name: str) -> Tensor:
        """All tokens so far (L,)."""
        return torch.cat(self.parts[name]) if self.parts[name] else torch.zeros(0, dtype=COLUMNS[name])


@dataclass(slots=True)
class PendingGroup:
    """A prompt with its responses. step: of its admission. tick: at which its last response ended; None: it is unfinished.

    scored: whether a step has scored it; a checkpoint has no scores.
    """

    step: int
    prompt: Prompt
    responses: list[PendingResponse]
    tick: int | None = None
    scored: bool = False

    @property
    def ordinal(self) -> int:
        """Number of the prompt in the run."""
        return self.prompt.ordinal

    def batch(self, ids: Sequence[int]) -> Batch:
        """Its responses as an engine returns them, with the columns of RolloutRole.advance, or rows of sessions. ids: of the
        responses.
        """
        if rows := [response.rows for response in self.responses if response.rows is not None]:
            return Batch.concat([one.with_rows(id=torch.full((len(one),), id)) for id, one in zip(ids, rows, strict=True)])
        columns = {name: [response.column(name) for response in self.responses] for name in COLUMNS}
        texts = [response.text for response in self.responses]
        return Batch(
            lengths=torch.tensor([len(row) for row in columns["input_ids"]], dtype=torch.int64),
            tokens={name: torch.cat(rows) for name, rows in columns.items()},
            rows={"id": torch.tensor(ids), "finished": torch.tensor([response.finished for response in self.responses])},
            objects={} if None in texts else {"response": texts},
        )


class GroupBuffer:
    """All groups in flight. Requests have the id ordinal * n + sample.

    n: responses per group. tick: number of ticks so far, over the whole run.
    """

    def __init__(self, n: int, prompt: Callable[[int], Prompt], agents: AgentSessions | None = None) -> None:
        """prompt: the prompt with an ordinal, from which a checkpoint is restored. agents: responses are their sessions."""
        self.n = n
        self.agents = agents
        self.tick = 0
        self._restored = prompt
        self._groups: dict[int, PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._groups

    def prompt(self, id: int) -> Prompt:
        """The prompt of a request."""
        return self._groups[id // self.n].prompt

    @property
    def uids(self) -> set[int]:
        """Rows of the data that the prompts are."""
        return {group.prompt.uid for group in self._groups.values()}

    @property
    def n_unfinished(self) -> int:
        """Number of groups with an unfinished response."""
        return sum(group.tick is None for group in self._groups.values())

    def admit(self, step: int, prompt: Prompt, seeds: Sequence[int], greedy: Sequence[bool]) -> list[int]:
        """Add a group; returns the ids of its requests."""
        responses = [PendingResponse(*one) for one in zip(seeds, greedy, strict=True)]
        if len(responses) != self.n or prompt.ordinal in self._groups:
            raise ValueError(f"group {prompt.ordinal}: {len(responses)} of {self.n} responses, or in flight already")
        ids = self._ids(prompt.ordinal)
        if self.agents is not None:
            for id, response in zip(ids, responses, strict=True):
                response.session = self.agents.session(id, prompt, response.seed, response.greedy)
        self._groups[prompt.ordinal] = PendingGroup(step, prompt, responses)
        return ids

    def sessions(self, ids: Sequence[int]) -> list[Session]:
        """The sessions of agents that are these responses."""
        found = [self._response(id).session for id in ids]
        return [session for session in found if session is not None]

    def with_call(self, ids: Sequence[int]) -> list[int]:
        """Those of the requests that an engine can work on; a session may have to wait for its agent first."""
        if self.agents is None:
            return list(ids)
        return [session.id for session in self.sessions(ids) if session.calls]

    def requests(self, ids: Sequence[int]) -> Batch:
        """Rollout requests with what their responses have so far; see RolloutRole.advance."""
        if self.agents is not None:
            return requests([(session, lane) for session in self.sessions(ids) for lane in session.calls])
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

    def add(self, sampled: Batch, *, ended: bool) -> int:
        """Append sampled tokens to their responses; returns their number. ended: these responses ended at this tick, otherwise
        they were interrupted. Rows of sessions are whole.
        """
        if self.agents is not None:
            return self._add_sessions(sampled)
        columns = {name: sampled.split_rows(name) for name in COLUMNS}
        texts = sampled.objects.get("response")
        for row, id in enumerate(sampled.rows["id"].tolist()):
            response, group = self._response(id), self._groups[id // self.n]
            # The text of a part is no part of the text.
            response.text = texts[row] if texts is not None and not response.parts["input_ids"] else None
            for name, parts in response.parts.items():
                parts.append(columns[name][row])
            if ended:
                self._end(group, response, int(sampled.rows["finished"][row]))
        return sampled.total_tokens

    def _add_sessions(self, rows: Batch) -> int:
        of_row = rows.rows["id"]
        for id in of_row.unique().tolist():
            response = self._response(id)
            response.rows = rows.select((of_row == id).nonzero().flatten())
            self._end(self._groups[id // self.n], response, int(response.rows.rows["finished"][-1]))
        return int(rows.tokens["response_mask"].count_nonzero())

    def _end(self, group: PendingGroup, response: PendingResponse, finished: int) -> None:
        response.finished = finished
        if all(other.finished is not None for other in group.responses):
            group.tick = self.tick

    def unfinished(self) -> list[list[int]]:
        """Ids of the requests whose responses have not ended, by group, in order."""
        rows = (
            [id for id, response in zip(self._ids(ordinal), group.responses, strict=True) if response.finished is None]
            for ordinal, group in sorted(self._groups.items())
        )
        return [ids for ids in rows if ids]

    def complete(self) -> list[PendingGroup]:
        """Groups whose responses have all ended, in the order in which steps take them: by tick, then ordinal."""
        complete = ((group.tick, ordinal) for ordinal, group in self._groups.items() if group.tick is not None)
        return [self._groups[ordinal] for _, ordinal in sorted(complete)]

    def choose(self, kept: Collection[int], count: int, step: int, max_age: int) -> list[int]:
        """Ordinals of the complete groups of ``kept`` that the step takes whatever completes later; it can end with ``count``.

        They are the first by tick and ordinal, except that groups which later steps could not take before they exceed ``max_age``
        come first, and the step waits for them. Other groups than those of ``kept`` count, because they may be kept later.

        No group exceeds ``max_age`` if at most (max_age + 1) * count are in flight. Proof: let g(a) be the number of groups of
        age >= a. Every step leaves g(a) <= (max_age - a) * count behind: for a = 0 by the bound, for a = max_age, ..., 1 because
        it takes groups of age >= a until that holds. The next step begins with g(a + 1) <= (max_age - a) * count, so ``count``
        groups suffice. For a = max_age no group is left.
        """
        age = {ordinal: step - group.step for ordinal, group in self._groups.items()}
        ready = [group.ordinal for group in self.complete() if group.ordinal in kept]
        # More complete groups change nothing chosen: each threshold takes the first that are ready and keeps room for the rest.
        chosen: dict[int, None] = {}  # in order; a list would be searched for every group
        awaited = 0  # groups that must be taken and are not ready
        for at_least in range(max_age, 0, -1):
            left = sum(of_group >= at_least for of_group in age.values()) - len(chosen) - awaited
            # At most ``count``, also after a resume with a smaller max_age.
            due = min(max(0, left - (max_age - at_least) * count), count - len(chosen) - awaited)
            late = [ordinal for ordinal in ready if age[ordinal] >= at_least and ordinal not in chosen][:due]
            chosen |= dict.fromkeys(late)
            awaited += due - len(late)
        return [*chosen, *[ordinal for ordinal in ready if ordinal not in chosen][: count - len(chosen) - awaited]]

    def remove(self, ordinals: Iterable[int]) -> list[PendingGroup]:
        """Remove groups that are trained on, or that a filter drops; returns them."""
        return [self._groups.pop(ordinal) for ordinal in ordinals]

    def arrays(self) -> dict[str, Tensor]:
        """All groups, for a checkpoint. By group: ordinal, step, tick (-1: unfinished), scored. By response: seed, greedy,
        finished (-1: neither), length. By token: the columns. now: the tick. Sessions: see saved_sessions.pack.
        """
        groups = [group for _, group in sorted(self._groups.items())]
        responses = [response for group in groups for response in group.responses]
        columns = {name: [response.column(name) for response in responses] for name in COLUMNS}
        numbers = {
            "now": [self.tick],
            "ordinal": [group.ordinal for group in groups],
            "step": [group.step for group in groups],
            "tick": [-1 if group.tick is None else group.tick for group in groups],
            "scored": [int(group.scored) for group in groups],
            "seed": [response.seed for response in responses],
            "greedy": [response.greedy for response in responses],
            "finished": [-1 if response.finished is None else response.finished for response in responses],
            "length": [len(row) for row in columns["input_ids"]],
        }
        tokens = {name: torch.cat([torch.zeros(0, dtype=COLUMNS[name]), *rows]) for name, rows in columns.items()}
        arrays = {name: torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()} | tokens
        if self.agents is None:
            return arrays
        rows = [response.rows for response in responses if response.rows is not None]
        unfinished = self.sessions([id for ids in self.unfinished() for id in ids])
        return arrays | pack(rows, [(session, self.agents.journal(session)) for session in unfinished])

    def load_arrays(self, arrays: Mapping[str, Tensor]) -> None:
        """Replace all groups by those of ``arrays``; none for a checkpoint without them."""
        if self.agents is not None:
            sessions = self.sessions([id for ids in self.unfinished() for id in ids])
            self.agents.pool.stop([session.task.id for session in sessions])
        self._groups = {}
        if not arrays:
            return
        self.tick = int(arrays["now"])
        lengths = arrays["length"].tolist()
        columns = {name: [*arrays[name].split(lengths)] for name in COLUMNS}
        responses = [
            PendingResponse(
                seed, bool(greedy), {name: [rows[place]] for name, rows in columns.items()}, None if finished < 0 else finished
            )
            for place, (seed, greedy, finished) in enumerate(
                zip(*(arrays[name].tolist() for name in ("seed", "greedy", "finished")), strict=True)
            )
        ]
        # Checkpoints of earlier versions do not know what was scored.
        scored = arrays.get("scored", torch.zeros_like(arrays["tick"])).bool().tolist()
        for place, (ordinal, step, tick) in enumerate(
            zip(*(arrays[name].tolist() for name in ("ordinal", "step", "tick")), strict=True)
        ):
            of_group = responses[place * self.n : (place + 1) * self.n]
            tick = None if tick < 0 else tick
            self._groups[ordinal] = PendingGroup(step, self._restored(ordinal), of_group, tick, scored[place])
        if self.agents is not None:
            self._load_sessions(self.agents, arrays)

    def _load_sessions(self, agents: AgentSessions, arrays: Mapping[str, Tensor]) -> None:
        rows, unfinished = iter(unpack_rows(arrays)), list[Session]()
        for group in self._groups.values():
            for id, response in zip(self._ids(group.ordinal), group.responses, strict=True):
                if response.finished is None:
                    response.session = agents.session(id, group.prompt, response.seed, response.greedy)
                    unfinished.append(response.session)
                else:
                    response.rows = next(rows)
        restore(arrays, unfinished)

    def _ids(self, ordinal: int) -> list[int]:
        return [ordinal * self.n + sample for sample in range(self.n)]

    def _response(self, id: int) -> PendingResponse:
        return self._groups[id // self.n].responses[id % self.n]
