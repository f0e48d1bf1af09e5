"""Sessions of agents as a flow: what ``RolloutFlow`` is for responses, for conversations with tools and environments.

A session alternates between the engines, which sample its turns, and an agent process, which runs tools and says what comes
next. Turns that end in a tick are given to the agents at its end, and their answers are due at the end of the next tick, so that
tools run while the engines generate. An answer that is late is waited for. So every request enters at a tick that depends on
nothing but earlier ticks, and a run is repeated bitwise however long its tools take. With the wall clock answers enter at the end
of the tick in which they arrive: the engines wait only if every session waits for a tool.

A session may have several calls in the engines, each in a lane of its own. Its answer then has any number of further calls, also
none, and turns that end before it has answered are given to it afterwards: what it does next depends on ticks alone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from math import inf
from typing import Any, Protocol

import numpy as np
import torch

from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Task, Wanted
from trainer.data.dataset import Prompt
from workers.batch import Batch
from workers.rollout.base import FinishReason
from workers.seeding import seed_of

_LANE = 1 << 32
"""Ids of sessions are below it: call number ``lane`` of a session at the same time is the request id + lane * _LANE."""
COLUMNS = {"input_ids": torch.int64, "rollout_log_probs": torch.float32, "weight_version": torch.int32}


class Agents(Protocol):
    """The agent processes, see trainer.agents.sessions.pool.AgentPool."""

    continues: bool
    seconds_waited: float

    def wait_ready(self) -> None: ...

    def start(self, sessions: Sequence[Task | Journal]) -> None: ...

    def reply(self, turns: Mapping[int, Sequence[SampledTurn]]) -> None: ...

    def collect(self, wait: Collection[int], others: Collection[int] = ()) -> list[Wanted | Finished]: ...

    def ready(self, others: Collection[int], seconds: float = 0.0) -> list[Wanted | Finished]: ...

    def stop(self, sessions: Iterable[int]) -> None: ...

    def journal(self, session: int) -> Journal: ...


class Flow(Protocol):
    """Responses that are generated tick by tick: trainer.rollout.remote_rollout.RolloutFlow, or with agents SessionFlow."""

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None: ...

    @property
    def waiting(self) -> bool: ...

    @property
    def unfinished(self) -> int: ...

    @property
    def has_lost(self) -> bool: ...

    def start(self) -> bool: ...

    def wait(self) -> list[Batch]: ...

    def settle(self) -> list[Batch]: ...

    def suspend(self) -> tuple[list[Batch], list[Batch]]: ...

    def discard(self) -> list[Batch]: ...


class RequestFlow(Flow, Protocol):
    """A flow of requests, which may be forgotten."""

    def forget(self, ids: Collection[int]) -> None: ...


_NOTHING = {name: torch.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}


@dataclass(slots=True)
class OpenCall:
    """A call in the engines. partial: what was sampled for it before it was interrupted, by column (L,)."""

    wanted: Wanted
    partial: Mapping[str, torch.Tensor] = field(default_factory=lambda: _NOTHING)

    def turn(self, sampled: Mapping[str, np.ndarray], finished: int) -> SampledTurn:
        """The turn that ends it. sampled: by column, after ``partial``."""
        if self.partial is not _NOTHING:
            sampled = {name: np.concatenate([self.partial[name].numpy(), sampled[name]]) for name in COLUMNS}
        ids, log_probs, versions = (sampled[name] for name in COLUMNS)
        reason: FinishReason = "stop" if finished else "length"
        return SampledTurn(self.wanted.key, self.wanted.ordinal, ids, log_probs, versions, reason)


@dataclass(slots=True)
class Session:
    """A session, as it is kept between two flows. id: in its flow. seed: of its turns. greedy: whatever the sampling is.

    calls: those that it waits for, by lane; none: its process has not answered yet. journal: of a session that no process has,
    because it was restored from a checkpoint; interrupted: what was sampled for its calls, by key and ordinal. restarted: whether
    it had to begin anew after that.
    """

    id: int
    task: Task
    seed: int
    greedy: bool
    calls: dict[int, OpenCall] = field(default_factory=dict)
    journal: Journal | None = None
    interrupted: dict[tuple[int, int], Mapping[str, torch.Tensor]] = field(default_factory=dict)
    restarted: bool = False

    def restart(self) -> None:
        """Begin anew: no process can repeat its journal."""
        self.journal, self.interrupted, self.restarted = None, {}, True

    def add(self, wanted: Wanted) -> int | None:
        """Open a call; returns its lane, or None for a call that is open: the session has made it again after it began anew."""
        if any((one.wanted.key, one.wanted.ordinal) == (wanted.key, wanted.ordinal) for one in self.calls.values()):
            return None
        lane = next(lane for lane in count() if lane not in self.calls)
        self.calls[lane] = OpenCall(wanted)
        return lane

    def renumber(self) -> None:
        """Number the lanes from 0 on, as they are after a resume; no engine has the calls."""
        self.calls = dict(enumerate(self.calls.values()))

    def resumed(self) -> None:
        """Its process has repeated the journal and made these calls, or has begun anew."""
        # The lanes of the run that was not resumed, see ``renumber``.
        saved = {call: place for place, call in enumerate(self.interrupted)}
        in_order = sorted(self.calls.values(), key=lambda one: saved.get((one.wanted.key, one.wanted.ordinal), len(saved)))
        self.calls = dict(enumerate(in_order))
        # Otherwise what was sampled for a call would continue another one.
        for call in self.calls.values():
            call.partial = self.interrupted.pop((call.wanted.key, call.wanted.ordinal), call.partial)
        if self.interrupted:
            raise ValueError(f"session {self.id} does not wait for the call that was saved: tools or template have changed")
        self.journal = None


class AgentSessions:
    """Makes sessions of prompts, and flows of them. max_prompt, max_tokens, max_length: of a task. in_step: the logical clock."""

    def __init__(
        self, pool: Agents, *, max_prompt: int, max_tokens: int, max_length: int = sys.maxsize, in_step: bool = True
    ) -> None:
        self.pool = pool
        self.in_step = in_step
        self.max_prompt = max_prompt
        self.max_tokens = max_tokens
        self.max_length = max_length
        self._n = 0

    def session(self, id: int, prompt: Prompt, seed: int, greedy: bool) -> Session:
        """A session that has not begun. Raises ValueError if the prompt is a text, which has no turns."""
        if not isinstance(prompt.messages, list):
            raise ValueError(f"row {prompt.uid}: its prompt is a text; with multi_turn.enable=true it must be a list of messages")
        self._n += 1
        task = Task(
            id=self._n,
            prompt=prompt.messages,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            agent=prompt.agent,
            max_prompt=self.max_prompt,
            max_tokens=self.max_tokens,
            max_length=self.max_length,
        )
        return Session(id, task, seed, greedy)

    def journal(self, session: Session) -> Journal:
        """Journal of a session that has begun."""
        # A session that was restored is started again when a flow gets it.
        return self.pool.journal(session.task.id) if session.journal is None else session.journal


class SessionFlow:
    """Sessions that go through the agent processes and the engines; the methods are those of RolloutFlow.

    Batches that ``wait`` returns have whole rows: input_ids, response_mask, rollout_log_probs and weight_version (T,), rows id,
    part, finished, prompt_length, and objects["session"] (Finished without its parts).
    """

    def __init__(
        self,
        agents: Agents,
        sessions: Callable[[Sequence[int]], Iterable[Session]],
        flow: Callable[[Callable[[Sequence[int]], Batch]], RequestFlow],
        *,
        in_step: bool,
    ) -> None:
        """sessions: those with these ids. flow: a flow of requests, given what makes them. in_step: the logical clock."""
        self._agents = agents
        self._sessions = sessions
        self._in_step = in_step
        self._flow = flow(self._requests)
        self._open: dict[int, Session] = {}
        """Sessions that have not finished, by id."""
        self._of_task: dict[int, Session] = {}
        """The same, by the id of the task."""
        self._due: set[int] = set()
        """Tasks whose process has not answered yet."""
        self._held: dict[int, list[SampledTurn]] = {}
        """Turns of sessions whose process has not answered yet, by task."""
        self._early: list[Finished] = []
        """Sessions that were restored and have finished at once."""
        self._runs = False
        """Whether engines have calls."""

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        """Begin sessions of one prompt, or continue those that earlier flows have begun."""
        new = list[Task | Journal]()
        known = list[Session]()
        restored = set[int]()
        for session in self._sessions(ids):
            self._open[session.id] = self._of_task[session.task.id] = session
            if session.journal is not None and not self._agents.continues:
                session.restart()
            if session.journal is not None:
                restored.add(session.task.id)
                new.append(session.journal)
            elif session.calls:
                session.renumber()
                known.append(session)
            else:
                self._due.add(session.task.id)
                new.append(session.task)
        if new:
            self._agents.start(new)
        if restored:
            # Now: they are in the engines from the first tick on, as in the run that was not resumed.
            for answer in sorted(self._agents.collect(restored), key=self._place):
                session = self._of_task[answer.id]
                if answer.restarted:
                    session.restart()
                if isinstance(answer, Finished):
                    self._early.append(answer)
                else:
                    session.add(answer)
            for session in map(self._of_task.__getitem__, restored):
                if session.calls:
                    session.resumed()
                    known.append(session)
        known.sort(key=lambda session: session.id)
        self._enter((session, lane) for session in known for lane in session.calls)

    @property
    def waiting(self) -> bool:
        """Whether requests wait for a replica that has room for them."""
        return self._flow.waiting

    @property
    def unfinished(self) -> int:
        """Number of sessions that have not finished."""
        return len(self._open)

    @property
    def has_lost(self) -> bool:
        """See RolloutFlow.has_lost."""
        return self._flow.has_lost

    def start(self) -> bool:
        """Give the replicas their next calls; returns whether a call or an agent is at work."""
        self._runs = self._flow.start()
        return self._runs or bool(self._due or self._early)

    def wait(self) -> list[Batch]:
        """Wait for the end of this tick; returns the sessions that finished."""
        due, ended = {*self._due}, self._flow.wait() if self._runs else []
        self._reply(ended)
        if self._in_step:
            return self._collect(due)
        return self._take(self._agents.ready(self._of_task, inf if self._due and not self._flow.unfinished else 0.0))

    def settle(self) -> list[Batch]:
        """Wait for calls and agents; the engines keep the requests. Returns sessions that finished."""
        self._reply(self._flow.settle())
        return self._collect_all()

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        """Take all requests from the engines, and wait for the agents. Returns sessions that finished; the second is empty.

        What was sampled for the others is kept in the sessions.
        """
        ended, interrupted = self._flow.suspend()
        self._reply(ended)
        for part in interrupted:
            for id, columns in _rows(part):
                lane, session = divmod(id, _LANE)
                if session in self._open and lane in self._open[session].calls:
                    call = self._open[session].calls[lane]
                    call.partial = {name: torch.cat([call.partial[name], torch.from_numpy(columns[name])]) for name in COLUMNS}
        finished = self._collect_all()
        self._open, self._of_task = {}, {}
        return finished, []

    def discard(self) -> list[Batch]:
        """As ``suspend``, but the others are stopped: they are never continued."""
        sessions = [*self._of_task]
        finished, _ = self.suspend()
        self._agents.stop(sessions)
        return finished

    def _requests(self, ids: Sequence[int]) -> Batch:
        places = (divmod(id, _LANE) for id in ids)
        return requests([(self._open[session], lane) for lane, session in places])

    def _reply(self, ended: Iterable[Batch]) -> None:
        """Give the turns that ended to their agents, whose answers are due from now on."""
        turns = defaultdict[int, list[SampledTurn]](list)
        for part in ended:
            finished = dict(zip(part.rows["id"].tolist(), part.rows["finished"].tolist(), strict=True))
            for id, columns in _rows(part):
                lane, number = divmod(id, _LANE)
                session = self._open.get(number)
                if session is not None:  # it may have finished without this call
                    turn = session.calls.pop(lane).turn(columns, finished[id])
                    turns[session.task.id].append(turn)
        for of_session in turns.values():
            of_session.sort(key=lambda turn: (turn.key, turn.ordinal))
        if self._in_step:
            # An agent that is at work gets them when it has answered; otherwise its speed would decide what it knows.
            for id in turns.keys() & self._due:
                self._held[id] = turns.pop(id)
        self._give(turns)

    def _give(self, turns: Mapping[int, Sequence[SampledTurn]]) -> None:
        if turns:
            self._agents.reply(turns)
            self._due |= turns.keys()

    def _collect(self, due: Collection[int]) -> list[Batch]:
        """Wait for answers that are due, then give these agents the turns that ended meanwhile."""
        self._due -= {*due}
        finished = self._take(self._agents.collect(due, self._of_task))
        held, self._held = self._held, {}
        self._give({id: turns for id, turns in held.items() if id in self._of_task})
        return finished

    def _collect_all(self) -> list[Batch]:
        """Wait until no agent is at work."""
        finished = list[Batch]()
        while self._due:
            finished += self._collect({*self._due})
        return finished

    def _take(self, answers: Iterable[Wanted | Finished]) -> list[Batch]:
        """Requests of the sessions that want turns, in order; rows of those that have finished."""
        made, rows = list[tuple[Session, int]](), list[Batch]()
        answers, self._early = [*self._early, *answers], []
        for answer in sorted(answers, key=self._place):
            self._due.discard(answer.id)
            session = self._of_task[answer.id]
            session.restarted |= answer.restarted
            if isinstance(answer, Finished):
                rows.append(finished_rows(session.id, answer, seed=session.seed, restarted=session.restarted))
                self._flow.forget([session.id + lane * _LANE for lane in session.calls])
                made = [one for one in made if one[0] is not session]
                del self._open[session.id], self._of_task[answer.id]
            elif (lane := session.add(answer)) is not None:
                made.append((session, lane))
        self._enter(made)
        return [Batch.concat(rows)] if rows else []

    def _place(self, answer: Wanted | Finished) -> tuple[int, ...]:
        """Sorts answers by session and call, the result of a session last."""
        call = (1,) if isinstance(answer, Finished) else (0, answer.key, answer.ordinal)
        return self._of_task[answer.id].id, *call

    def _enter(self, calls: Iterable[tuple[Session, int]]) -> None:
        """Queue calls; adjacent ones with the same prompt together."""
        for _, same in groupby(calls, key=lambda one: one[0].calls[one[1]].wanted.prompt_ids.tobytes()):
            group = list(same)
            session, lane = group[0]
            prompt = session.calls[lane].wanted.prompt_ids
            self._flow.admit([session.id + lane * _LANE for session, lane in group], len(prompt))


def requests(calls: Sequence[tuple[Session, int]]) -> Batch:
    """Calls of sessions, each with its lane, as rows of requests, see RolloutRole.advance."""
    opened = [session.calls[lane] for session, lane in calls]
    begun = [one.partial["input_ids"] for one in opened]
    wanted = [one.wanted for one in opened]
    parts = [ids for call, more in zip(wanted, begun, strict=True) for ids in (call.prompt_ids, more.numpy())]
    rows = {
        "id": [session.id + lane * _LANE for session, lane in calls],
        "seed": [seed_of(one.seed, call.key, call.ordinal) for (one, _), call in zip(calls, wanted, strict=True)],
        "begun": [len(more) for more in begun],
        "max_tokens": [call.max_tokens for call in wanted],
    }
    return Batch(
        lengths=torch.tensor([len(call.prompt_ids) + len(more) for call, more in zip(wanted, begun, strict=True)]),
        tokens={"input_ids": torch.from_numpy(np.concatenate(parts))},
        rows={name: torch.tensor(values, dtype=torch.int64) for name, values in rows.items()}
        | {"greedy": torch.tensor([session.greedy for session, _ in calls])},
    )


def _rows(part: Batch) -> Iterable[tuple[int, dict[str, np.ndarray]]]:
    """Id and columns of each row."""
    columns, offsets = {name: part.tokens[name].numpy() for name in COLUMNS}, part.offsets.tolist()
    for id, start, end in zip(part.rows["id"].tolist(), offsets, offsets[1:], strict=False):
        yield id, {name: column[start:end] for name, column in columns.items()}


def finished_rows(id: int, session: Finished, *, seed: int, restarted: bool) -> Batch:
    """The rows of a session, see SessionFlow."""
    parts = session.parts
    columns = {
        name: torch.from_numpy(np.concatenate(of_parts))
        for name, of_parts in {
            "input_ids": [part.input_ids for part in parts],
            "response_mask": [part.response_mask for part in parts],
            "rollout_log_probs": [part.rollout_log_probs for part in parts],
            "weight_version": [part.weight_version for part in parts],
        }.items()
    }
    metrics = session.metrics | ({"restarted": 1.0} if restarted else {})
    facts = {
        "seed": seed,
        "reward": session.reward,
        "extra": session.extra,
        "metrics": metrics,
        "messages": session.messages,
        "turns": session.turns,
    }
    return Batch(
        lengths=torch.tensor([len(part.input_ids) for part in parts], dtype=torch.int64),
        tokens=columns | {"response_mask": columns["response_mask"].float()},
        rows={
            "id": torch.full((len(parts),), id),
            "part": torch.arange(len(parts)),
            "finished": torch.full((len(parts),), int(session.finished)),
            "prompt_length": torch.tensor([part.prompt_length for part in parts], dtype=torch.int64),
        },
        objects={"session": [facts] * len(parts)},
    )


def agent_metrics(sessions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over sessions of their metrics, 0 where a session lacks one. sessions: facts of ``finished_rows``.

    Seconds are sums, under timing_s: they depend on the clock.
    """
    of_each = [session["metrics"] for session in sessions]
    names = sorted({name for metrics in of_each for name in metrics})
    sums = {name: sum(metrics.get(name, 0.0) for metrics in of_each) for name in names}
    seconds = {f"timing_s/agents/{name}": sums.pop(name) for name in names if name.endswith("seconds")}
    means = {f"agents/{name}": value / len(of_each) for name, value in sums.items()}
    return seconds | means | {"agents/turns/max": max(metrics["turns"] for metrics in of_each)}
