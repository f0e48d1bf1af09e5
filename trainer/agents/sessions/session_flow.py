"""Sessions of agents as a flow: what ``RolloutFlow`` is for responses, for conversations with tools and environments.

A session alternates between the engines, which sample its turns, and an agent process, which runs tools and says what comes
next. Turns that end in a tick are given to the agents at its end, and their answers are due at the end of the next tick, so that
tools run while the engines generate. An answer that is late is waited for. So every request enters at a tick that depends on
nothing but earlier ticks, and a run is repeated bitwise however long its tools take. With the wall clock answers enter at the end
of the tick in which they arrive: the engines wait only if every session waits for a tool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any, Protocol

import numpy as np
import torch

from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Task, Wanted
from trainer.data.dataset import Prompt
from workers.batch import Batch
from workers.rollout.base import FinishReason
from workers.seeding import seed_of

COLUMNS = {"input_ids": torch.int64, "rollout_log_probs": torch.float32, "weight_version": torch.int32}


class Agents(Protocol):
    """The agent processes, see trainer.agents.sessions.pool.AgentPool."""

    continues: bool
    seconds_waited: float

    def wait_ready(self) -> None: ...

    def start(self, sessions: Sequence[Task | Journal]) -> None: ...

    def reply(self, turns: Mapping[int, SampledTurn]) -> None: ...

    def collect(self, wait: Collection[int]) -> list[Wanted | Finished]: ...

    def ready(self, seconds: float = 0.0) -> list[Wanted | Finished]: ...

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


def _nothing() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}


@dataclass(slots=True)
class Session:
    """A session, as it is kept between two flows. id: in its flow. seed: of its turns. greedy: whatever the sampling is.

    wanted: the call that it waits for; None: its process has not answered yet. partial: what was sampled for this call before it
    was interrupted, by column (L,). journal: of a session that no process has, because it was restored from a checkpoint;
    interrupted: key and ordinal of its call. restarted: whether it had to begin anew after that.
    """

    id: int
    task: Task
    seed: int
    greedy: bool
    wanted: Wanted | None = None
    partial: dict[str, torch.Tensor] = field(default_factory=_nothing)
    journal: Journal | None = None
    interrupted: tuple[int, int] | None = None
    restarted: bool = False

    def restart(self) -> None:
        """Begin anew: no process can repeat its journal."""
        self.partial, self.journal, self.interrupted, self.restarted = _nothing(), None, None, True

    def resumed(self, wanted: Wanted) -> None:
        """Its process has repeated the journal and waits for this call, or has begun anew."""
        if wanted.restarted:
            self.restart()
        # Otherwise what was sampled for its call would continue another one.
        elif (wanted.key, wanted.ordinal) != self.interrupted:
            raise ValueError(f"session {self.id} does not wait for the call that was saved: tools or template have changed")
        self.wanted, self.journal, self.interrupted = wanted, None, None

    @property
    def call(self) -> Wanted:
        """The call that it waits for."""
        assert self.wanted is not None, "its process has answered"
        return self.wanted

    def turn(self, sampled: Mapping[str, torch.Tensor], finished: int) -> SampledTurn:
        """The turn that ends its call. sampled: by column, after ``partial``."""
        if len(self.partial["input_ids"]):
            sampled = {name: torch.cat([self.partial[name], sampled[name]]) for name in COLUMNS}
        ids, log_probs, versions = (sampled[name].numpy() for name in COLUMNS)
        reason: FinishReason = "stop" if finished else "length"
        return SampledTurn(self.call.key, self.call.ordinal, ids, log_probs, versions, reason)


class AgentSessions:
    """Makes sessions of prompts, and flows of them. max_prompt, max_tokens: of a task. in_step: the logical clock."""

    def __init__(self, pool: Agents, *, max_prompt: int, max_tokens: int, in_step: bool = True) -> None:
        self.pool = pool
        self.in_step = in_step
        self.max_prompt = max_prompt
        self.max_tokens = max_tokens
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
        flow: Callable[[Callable[[Sequence[int]], Batch]], Flow],
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
        self._early: list[Finished] = []
        """Sessions that were restored, began anew, and have finished at once."""
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
            elif session.wanted is not None:
                known.append(session)
            else:
                self._due.add(session.task.id)
                new.append(session.task)
        if new:
            self._agents.start(new)
        if restored:
            # Now: they are in the engines from the first tick on, as in the run that was not resumed.
            for answer in self._agents.collect(restored):
                session = self._of_task[answer.id]
                if isinstance(answer, Finished):
                    assert answer.restarted, "a session that has finished is not in flight"
                    session.restart()
                    self._early.append(answer)
                    continue
                session.resumed(answer)
                known.append(session)
        self._enter(sorted(known, key=lambda session: session.id))

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
        due, ended = set(self._due), self._flow.wait() if self._runs else []
        self._reply(ended)
        if self._in_step:
            return self._take(self._agents.collect(due))
        return self._take(self._agents.ready(inf if self._due and not self._flow.unfinished else 0.0))

    def settle(self) -> list[Batch]:
        """Wait for calls and agents; the engines keep the requests. Returns sessions that finished."""
        self._reply(self._flow.settle())
        return self._take(self._agents.collect(self._due))

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        """Take all requests from the engines, and wait for the agents. Returns sessions that finished; the second is empty.

        What was sampled for the others is kept in the sessions.
        """
        ended, interrupted = self._flow.suspend()
        self._reply(ended)
        for part in interrupted:
            for id, columns in _rows(part):
                partial = self._open[id].partial
                self._open[id].partial = {name: torch.cat([partial[name], columns[name]]) for name in COLUMNS}
        finished = self._take(self._agents.collect(self._due))
        self._open, self._of_task = {}, {}
        return finished, []

    def discard(self) -> list[Batch]:
        """As ``suspend``, but the others are stopped: they are never continued."""
        sessions = [*self._of_task]
        finished, _ = self.suspend()
        self._agents.stop(sessions)
        return finished

    def _requests(self, ids: Sequence[int]) -> Batch:
        return requests([self._open[id] for id in ids])

    def _reply(self, ended: Iterable[Batch]) -> None:
        """Give the turns that ended to their agents, whose answers are due from now on."""
        turns = dict[int, SampledTurn]()
        for part in ended:
            finished = dict(zip(part.rows["id"].tolist(), part.rows["finished"].tolist(), strict=True))
            for id, columns in _rows(part):
                session = self._open[id]
                turns[session.task.id] = session.turn(columns, finished[id])
                session.wanted, session.partial = None, _nothing()
        if turns:
            self._agents.reply(turns)
            self._due |= turns.keys()

    def _take(self, answers: Iterable[Wanted | Finished]) -> list[Batch]:
        """Requests of the sessions that want a turn, in order; rows of those that have finished."""
        wanted, rows = list[Session](), list[Batch]()
        answers, self._early = [*self._early, *answers], []
        for answer in sorted(answers, key=lambda answer: self._of_task[answer.id].id):
            self._due.discard(answer.id)
            session = self._of_task[answer.id]
            session.restarted |= answer.restarted
            if isinstance(answer, Wanted):
                session.wanted = answer
                wanted.append(session)
            else:
                rows.append(finished_rows(session.id, answer, seed=session.seed, restarted=session.restarted))
                del self._open[session.id], self._of_task[answer.id]
        self._enter(wanted)
        return [Batch.concat(rows)] if rows else []

    def _enter(self, sessions: Iterable[Session]) -> None:
        """Queue calls; adjacent ones with the same prompt together."""
        for _, same in groupby(sessions, key=lambda session: session.call.prompt_ids.tobytes()):
            group = list(same)
            self._flow.admit([session.id for session in group], len(group[0].call.prompt_ids))


def requests(sessions: Sequence[Session]) -> Batch:
    """The calls of sessions as rows of requests, see RolloutRole.advance."""
    calls, begun = [session.call for session in sessions], [session.partial["input_ids"] for session in sessions]
    parts = [ids for call, more in zip(calls, begun, strict=True) for ids in (call.prompt_ids, more.numpy())]
    rows = {
        "id": [session.id for session in sessions],
        "seed": [seed_of(one.seed, call.key, call.ordinal) for one, call in zip(sessions, calls, strict=True)],
        "begun": [len(more) for more in begun],
        "max_tokens": [call.max_tokens for call in calls],
    }
    return Batch(
        lengths=torch.tensor([len(call.prompt_ids) + len(more) for call, more in zip(calls, begun, strict=True)]),
        tokens={"input_ids": torch.from_numpy(np.concatenate(parts))},
        rows={name: torch.tensor(values, dtype=torch.int64) for name, values in rows.items()}
        | {"greedy": torch.tensor([session.greedy for session in sessions])},
    )


def _rows(part: Batch) -> Iterable[tuple[int, dict[str, torch.Tensor]]]:
    """Id and columns of each row."""
    columns = {name: part.split_rows(name) for name in COLUMNS}
    for row, id in enumerate(part.rows["id"].tolist()):
        yield id, {name: rows[row] for name, rows in columns.items()}


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
