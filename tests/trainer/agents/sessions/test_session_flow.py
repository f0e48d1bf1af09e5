"""Sessions through a flow: what is trained depends on neither ticks, nor the speed of tools, nor interruptions and restarts."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from trainer.agents.sessions.protocol import Finished, Journal, Part, SampledTurn, Task, Wanted
from trainer.agents.sessions.saved_sessions import pack, restore, unpack_rows
from trainer.agents.sessions.session_flow import COLUMNS, AgentSessions, Session, SessionFlow, agent_metrics
from trainer.data.dataset import Prompt
from workers.batch import Batch
from workers.seeding import seed_of

MOST = 40


@dataclass
class Script:
    """A program whose number of turns and observations are drawn from its prompt: observations are three tokens of its own."""

    journal: Journal
    messages: int = 0

    def answers(self) -> list[Wanted | Finished]:
        return [self.answer()]

    def answer(self) -> Wanted | Finished:
        task, turns = self.journal.task, self.journal.turns
        draw = random.Random(str(task.prompt))
        ids = [seed_of("prompt", str(task.prompt)) % 50]
        mask, log_probs, versions = [0], [0.0], [-1]
        outcomes = list[list[int]]()
        for turn in turns:
            ids += turn.token_ids.tolist()
            mask += [1] * len(turn.token_ids)
            log_probs += turn.log_probs.tolist()
            versions += turn.versions.tolist()
            outcomes.append([seed_of("observed", len(outcomes), *ids) % 50 for _ in range(3)])
            ids += outcomes[-1]
            mask += [0] * 3
            log_probs += [0.0] * 3
            versions += [-1] * 3
        left = MOST - len(ids)
        new = outcomes[len(self.journal.outcomes) :]
        if len(turns) == draw.randint(1, 4) or left <= 0:
            columns = (np.array(ids), np.array(mask, bool), np.array(log_probs, np.float32), np.array(versions, np.int32))
            metrics = {"turns": float(len(turns))}
            return Finished(task.id, [Part(*columns, prompt_length=1)], True, None, {"n": len(turns)}, metrics, [], new)
        return Wanted(task.id, seed_of("call", *ids), 0, np.array(ids), left, new)


@dataclass
class Fork(Script):
    """Calls at the same time: a call, then up to 3 branches of up to 3 calls each, then one with what all have ended with.

    Each call is a row of its own. The calls depend on the turns that it has, in whatever order they came.
    """

    made: set[int] = field(default_factory=set)

    def answers(self) -> list[Wanted | Finished]:
        task, draw = self.journal.task, random.Random(str(self.journal.task.prompt))
        turns = {turn.key: turn for turn in self.journal.turns}
        calls, parts = dict[int, list[int]](), list[Part]()

        def call(*name: object) -> list[int] | None:
            """Tokens of a turn, None if it was not sampled yet."""
            key = seed_of("fork", str(task.prompt), *name)
            calls[key] = [seed_of(key) % 50, len(name)]
            turn = turns.get(key)
            if turn is None:
                return None
            n = len(turn.token_ids)
            columns = (np.array([0.0, 0.0, *turn.log_probs], np.float32), np.array([-1, -1, *turn.versions], np.int32))
            parts.append(Part(np.array([*calls[key], *turn.token_ids]), np.array([0, 0, *[1] * n], bool), *columns, 2))
            return [int(token) for token in turn.token_ids]

        ends, last = list[list[int] | None](), None
        if (first := call("first")) is not None:
            for branch in range(draw.randint(1, 3)):
                ends.append(first)
                for step in range(draw.randint(1, 3)):
                    ends[-1] = call(branch, step, ends[-1])
                    if ends[-1] is None:
                        break
            if self.early or all(end is not None for end in ends):
                last = call("last", *ends)
        if last is not None or (self.early and any(end is not None for end in ends)):
            return [Finished(task.id, parts, True, None, {"n": len(parts)}, {"turns": float(len(parts))}, [])]
        new = [key for key in calls if key not in turns and key not in self.made]
        self.made |= {*new}
        return [Wanted(task.id, key, 0, np.array(calls[key]), 12) for key in new]

    early = False


class Race(Fork):
    """Ends with the first branch that has ended; the other calls are given up."""

    early = True


class Agents:
    """Agent processes whose answers to a message take a drawn number of questions. calls: user code that ran."""

    continues = True
    program: type[Script] = Script

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.scripts: dict[int, Script] = {}
        self.answers: dict[int, list[Wanted | Finished]] = {}
        self.most = 0
        """Calls of a session without a turn."""
        self.calls = 0
        self.seconds_waited = 0.0

    def wait_ready(self) -> None:
        """They are."""

    def start(self, sessions: Sequence[Task | Journal]) -> None:
        for one in sessions:
            journal = one if isinstance(one, Journal) else Journal(one)
            assert journal.task.id not in self.scripts
            self.scripts[journal.task.id] = self.program(deepcopy(journal))
            self._answer(journal.task.id)

    def reply(self, turns: Mapping[int, Sequence[SampledTurn]]) -> None:
        for id, of_session in turns.items():
            assert id not in self.answers or self.program is Fork, "one message at a time"
            journal = self.scripts[id].journal
            for turn in of_session:
                assert (turn.key, turn.ordinal) in journal.waits, "a turn for each call"
                journal.waits.remove((turn.key, turn.ordinal))
                journal.turns.append(turn)
            self._answer(id)

    def _answer(self, id: int) -> None:
        journal = self.scripts[id].journal
        for answer in self.scripts[id].answers():
            self.calls += len(answer.outcomes)
            journal.outcomes += answer.outcomes
            if isinstance(answer, Wanted) and (answer.key, answer.ordinal) not in journal.waits:
                journal.waits.append((answer.key, answer.ordinal))
            self.answers.setdefault(id, []).append(answer)
        self.answers.setdefault(id, [])
        self.most = max(self.most, len(journal.waits))

    def collect(self, wait: Collection[int], others: Collection[int] = ()) -> list[Wanted | Finished]:
        found = [answer for id in wait for answer in self.answers.pop(id, ())]
        self.draw.shuffle(found)
        return found

    def ready(self, others: Collection[int], seconds: float = 0.0) -> list[Wanted | Finished]:
        assert self.answers or not seconds, "waits for ever"
        waited = [self.draw.choice([*self.answers])] if seconds else []
        return self.collect([id for id in self.answers if id in waited or self.draw.random() < 0.5])

    def stop(self, sessions: Iterable[int]) -> None:
        for id in sessions:
            self.scripts.pop(id, None)
            self.answers.pop(id, None)

    def journal(self, session: int) -> Journal:
        return deepcopy(self.scripts[session].journal)


@dataclass
class Turns:
    """A flow that samples ``step`` tokens of each request per tick; a token depends on seed and position alone. 0 ends a turn."""

    requests: Callable[[Sequence[int]], Batch]
    step: int
    version: int = 0
    admitted: list[tuple[int, ...]] = field(default_factory=list)
    running: dict[int, tuple[Batch, list[int]]] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)
    forgotten: int = 0
    waiting: bool = False
    has_lost: bool = False

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.new)

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        self.admitted.append((*ids, prompt_tokens))
        self.new += ids

    def forget(self, ids: Collection[int]) -> None:
        self.forgotten += len(ids)
        self.new = [id for id in self.new if id not in ids]
        self.running = {id: one for id, one in self.running.items() if id not in ids}

    def start(self) -> bool:
        for id in self.new:
            self.running[id] = self.requests([id]), []
        self.new = []
        return bool(self.running)

    def wait(self) -> list[Batch]:
        ended = []
        for id, (request, tokens) in [*self.running.items()]:
            begun, most = int(request.rows["begun"]), int(request.rows["max_tokens"])
            for _ in range(self.step):
                tokens.append(seed_of(int(request.rows["seed"]), begun + len(tokens)) % 12)
                if tokens[-1] == 0 or begun + len(tokens) == most:
                    ended.append(self._row(id, tokens, finished=int(tokens[-1] == 0)))
                    del self.running[id]
                    break
        return [Batch.concat(ended)] if ended else []

    def settle(self) -> list[Batch]:
        return self.wait() if self.running else []

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        rows = [self._row(id, tokens, finished=0) for id, (_, tokens) in self.running.items()]
        rows += [self._row(id, [], finished=0) for id in self.new]
        self.running, self.new = {}, []
        return [], rows

    def _row(self, id: int, tokens: list[int], finished: int) -> Batch:
        columns = (tokens, [-0.5 * token for token in tokens], [self.version] * len(tokens))
        return Batch(
            torch.tensor([len(tokens)]),
            {name: torch.tensor(of, dtype=dtype) for (name, dtype), of in zip(COLUMNS.items(), columns, strict=True)},
            {"id": torch.tensor([id]), "finished": torch.tensor([finished])},
        )


def new_session(sessions: AgentSessions, id: int) -> Session:
    messages = [{"role": "user", "content": f"task {id // 2}"}]
    return sessions.session(id, Prompt(id // 2, (1,), "", "", None, {}, messages), seed=id, greedy=False)


def drive(flow: SessionFlow, ticks: int = 10**6) -> Iterator[Batch]:
    """Finished sessions of at most ``ticks`` ticks."""
    while ticks and flow.start():
        yield from flow.wait()
        ticks -= 1


def trained(parts: Sequence[Batch]) -> list[tuple[int, list[int], list[float], list[float]]]:
    """Rows by id, as lists."""
    rows = Batch.concat(parts)
    columns = [[one.tolist() for one in rows.split_rows(name)] for name in ("input_ids", "response_mask", "rollout_log_probs")]
    return sorted(zip(rows.rows["id"].tolist(), *columns, strict=True))


def run(n: int, *, step: int, in_step: bool = True, agents: Agents | None = None) -> tuple[list[Batch], Turns]:
    agents = agents or Agents()
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    of_id = {id: new_session(sessions, id) for id in range(n)}
    made = list[Turns]()

    def turns(requests: Callable[[Sequence[int]], Batch]) -> Turns:
        made.append(Turns(requests, step))
        return made[0]

    flow = SessionFlow(agents, lambda ids: [of_id[id] for id in ids], turns, in_step=in_step)
    for first in range(0, n, 2):
        flow.admit(range(first, min(n, first + 2)), 1)
    return [*drive(flow)], made[0]


def test_rows_depend_on_neither_ticks_nor_the_speed_of_the_agents() -> None:
    expected, _ = run(20, step=4)
    assert [id for id, *_ in trained(expected)] == [*range(20)]
    assert len({sum(mask) for _, _, mask, _ in trained(expected)}) > 5
    for seed in range(6):
        for step in (1, 3, 1000):
            assert trained(run(20, step=step, agents=Agents(seed))[0]) == trained(expected)
            assert trained(run(20, step=step, in_step=False, agents=Agents(seed))[0]) == trained(expected)


def test_requests_enter_in_the_same_order_however_the_agents_answer() -> None:
    admitted = [run(20, step=2, agents=Agents(seed))[1].admitted for seed in range(5)]
    assert all(one == admitted[0] for one in admitted)
    assert (0, 1, 1) in admitted[0], "first turns of a group share their prompt"


def test_agents_work_while_the_engines_generate() -> None:
    """An answer is taken a tick after the turn was given, unless the engines have nothing else to do."""
    agents = Agents()
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    of_id = {id: new_session(sessions, id) for id in range(8)}
    flow = SessionFlow(agents, lambda ids: [of_id[id] for id in ids], lambda requests: Turns(requests, 1), in_step=True)
    flow.admit([0, 1], 1)
    assert flow.start() and not flow.wait() and of_id[0].calls
    flow.admit([2, 3], 1)
    overlapped = 0
    while flow.start():
        given = {id for id, one in of_id.items() if one.task.id in agents.answers}
        overlapped += bool(given) and flow._runs
        flow.wait()
        assert not given & {id for id, one in of_id.items() if one.task.id in agents.answers}, "due at the end of this tick"
    assert overlapped > 3


class Slow(Agents):
    """An answer comes when it is waited for. flow: must have no request then."""

    flow: SessionFlow

    def ready(self, others: Collection[int], seconds: float = 0.0) -> list[Wanted | Finished]:
        assert not (seconds and self.flow._flow.unfinished), "the engines could work"
        return super().ready(others, seconds) if seconds else []


def test_wall_clock_waits_for_agents_only_if_all_sessions_do() -> None:
    agents = Slow()
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    of_id = {id: new_session(sessions, id) for id in range(8)}
    flow = SessionFlow(agents, lambda ids: [of_id[id] for id in ids], lambda requests: Turns(requests, 1), in_step=False)
    agents.flow = flow
    flow.admit(range(8), 1)
    finished, overlapped = list[Batch](), 0
    while flow.start():
        overlapped += bool(agents.answers) and flow._runs
        finished += flow.wait()
    assert overlapped > 3, "the engines work while agents have not answered"
    assert trained(finished) == trained(run(8, step=1)[0])


@pytest.mark.parametrize("program", [Script, Fork])
@pytest.mark.parametrize("restarts", [False, True])
def test_interrupted_sessions_continue_bitwise(restarts: bool, program: type[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended at any tick, as between two steps; with restarts also from the arrays of a checkpoint, in new processes."""
    monkeypatch.setattr(Agents, "program", program)
    expected, most = trained(run(12, step=4)[0]), 0
    for seed in range(12):
        draw, agents = random.Random(seed), Agents(seed)
        sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
        of_id: dict[int, Session | Batch] = {id: new_session(sessions, id) for id in range(12)}
        finished, n_calls, version = list[Batch](), 0, 0
        while any(isinstance(one, Session) for one in of_id.values()):

            def turns(requests: Callable[[Sequence[int]], Batch], version: int = version) -> Turns:
                return Turns(requests, 2, version)

            open_now = {id: one for id, one in of_id.items() if isinstance(one, Session)}
            flow = SessionFlow(agents, partial(map, open_now.__getitem__), turns, in_step=True)
            for id, one in of_id.items():
                if isinstance(one, Session):
                    flow.admit([id], 1)
            ended = [*drive(flow, draw.randint(1, 4))]
            ended += flow.suspend()[0]
            for part in ended:
                of_row = part.rows["id"]
                of_id |= {id: part.select((of_row == id).nonzero().flatten()) for id in of_row.unique().tolist()}
            version += 1
            if restarts:
                rows = [one for one in of_id.values() if isinstance(one, Batch)]
                unfinished = [one for one in of_id.values() if isinstance(one, Session)]
                arrays = pack(rows, [(one, agents.journal(one.task.id)) for one in unfinished])
                most = max(most, *(len(one.calls) for one in unfinished), 0)
                n_calls, agents = n_calls + agents.calls, Agents(seed + 100)
                sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
                again = [new_session(sessions, one.id) for one in unfinished]
                restore(arrays, again)
                calls = [{(c.wanted.key, c.wanted.ordinal) for c in one.calls.values()} for one in unfinished]
                assert [{*one.journal.waits} for one in again if one.journal is not None] == calls
                of_id |= {one.id: one for one in again}
                ended_ids = [id for id, one in of_id.items() if isinstance(one, Batch)]
                of_row = zip(ended_ids, unpack_rows(arrays), strict=True)
                of_id |= {id: one.with_rows(id=torch.full((len(one),), id)) for id, one in of_row}
        finished = [one for one in of_id.values() if isinstance(one, Batch)]
        assert trained(finished) == expected
        versions = Batch.concat(finished).tokens["weight_version"]
        assert versions.max() > 1, "tokens of several versions"
        n_turns = sum(one.objects["session"][0]["extra"]["n"] for one in finished)
        assert n_calls + agents.calls == (n_turns if program is Script else 0), "no user code ran twice"
    assert (most > 2) == (restarts and program is Fork), "several interrupted calls of a session in a checkpoint"


@pytest.mark.parametrize("program", [Fork, Race])
def test_calls_at_the_same_time_enter_and_end_at_the_same_ticks_however_the_agents_answer(
    program: type[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agents, "program", program)
    agents = Agents()
    first, flow = run(20, step=3, agents=agents)
    assert agents.most >= 3 and len({id for ids in flow.admitted for id in ids[:-1]}) > 30, "more requests than sessions"
    assert (flow.forgotten > 5) == (program is Race), "calls that a session has given up"
    for seed in range(1, 6):
        found, other = run(20, step=3, agents=Agents(seed))
        assert other.admitted == flow.admitted and trained(found) == trained(first)
    if program is Fork:
        for seed, step in product(range(4), (1, 2, 1000)):
            assert trained(run(20, step=step, agents=Agents(seed))[0]) == trained(first)
            assert trained(run(20, step=step, in_step=False, agents=Agents(seed))[0]) == trained(first)


class Late(Agents):
    """Half of the calls of an answer are made after it."""

    program = Fork

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.late: dict[int, list[Wanted | Finished]] = {}

    def collect(self, wait: Collection[int], others: Collection[int] = ()) -> list[Wanted | Finished]:
        found = list[Wanted | Finished]()
        for id in [id for id in self.late if id in others]:
            found += self.late.pop(id)
        for answer in super().collect(wait):
            late, waits = self.late.setdefault(answer.id, []), len(self.scripts[answer.id].journal.waits)
            # Not the last one: without a call that an engine works on, a session has not settled.
            is_late = isinstance(answer, Wanted) and waits > len(late) + 1 and self.draw.random() < 0.5
            (late if is_late else found).append(answer)
        self.late = {id: late for id, late in self.late.items() if late}
        return found


def test_calls_that_come_late_change_nothing_but_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agents, "program", Fork)
    expected = trained(run(20, step=3)[0])
    for seed in range(6):
        agents = Late(seed)
        found, _ = run(20, step=3, agents=agents)
        assert trained(found) == expected and not agents.late


def test_session_that_cannot_be_repeated_begins_anew_and_is_counted() -> None:
    agents = Agents()
    agents.continues = False
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    one = new_session(sessions, 0)
    one.journal = Journal(one.task, outcomes=["of the first process"])
    one.interrupted = {(5, 0): {name: torch.ones(3, dtype=dtype) for name, dtype in COLUMNS.items()}}
    flow = SessionFlow(agents, lambda ids: [one], lambda requests: Turns(requests, 4), in_step=True)
    flow.admit([0], 1)
    (rows,) = drive(flow)
    assert trained([rows]) == trained(run(1, step=4)[0])
    assert rows.objects["session"][0]["metrics"]["restarted"] == 1


class Changed(Agents):
    """Sessions with a journal begin anew; the process says so with its first answer."""

    def start(self, sessions: Sequence[Task | Journal]) -> None:
        super().start([one.task if isinstance(one, Journal) else one for one in sessions])
        ids = [one.task.id for one in sessions if isinstance(one, Journal)]
        self.answers |= {id: [replace(one, restarted=True) for one in self.answers[id]] for id in ids}


class Short(Changed):
    """The same, but they finish at once."""

    def start(self, sessions: Sequence[Task | Journal]) -> None:
        super().start(sessions)
        for one in sessions:
            if isinstance(one, Journal):
                part = Part(np.array([1]), np.array([False]), np.zeros(1, np.float32), np.array([-1], np.int32), 1)
                self.answers[one.task.id] = [Finished(one.task.id, [part], True, 1.0, {}, {"turns": 0.0}, [], restarted=True)]


@pytest.mark.parametrize("kind", [Changed, Short])
@pytest.mark.parametrize("in_step", [True, False])
def test_session_whose_process_begins_it_anew_continues_nothing_and_is_counted(kind: type[Agents], in_step: bool) -> None:
    agents = kind()
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    one = new_session(sessions, 0)
    one.journal = Journal(one.task, outcomes=["of the first process"])
    one.interrupted = {(5, 0): {name: torch.ones(3, dtype=dtype) for name, dtype in COLUMNS.items()}}
    flow = SessionFlow(agents, lambda ids: [one], lambda requests: Turns(requests, 4), in_step=in_step)
    flow.admit([0], 1)
    (rows,) = drive(flow)
    if kind is Changed:
        assert trained([rows]) == trained(run(1, step=4)[0])
    assert rows.objects["session"][0]["metrics"]["restarted"] == 1 and not flow.unfinished


def test_discarded_sessions_leave_no_agent_at_work() -> None:
    agents = Agents()
    sessions = AgentSessions(agents, max_prompt=8, max_tokens=MOST)
    of_id = {id: new_session(sessions, id) for id in range(6)}
    flow = SessionFlow(agents, lambda ids: [of_id[id] for id in ids], lambda requests: Turns(requests, 2), in_step=True)
    flow.admit(range(6), 1)
    finished = [*drive(flow, 3), *flow.discard()]
    ended = {of_id[id].task.id for part in finished for id in part.rows["id"].tolist()}
    assert 0 < len(ended) < 6 and agents.scripts.keys() == ended, "those that have finished left by themselves"
    assert not flow.unfinished and not agents.answers


def test_call_that_was_not_saved_is_an_error() -> None:
    """What was sampled for a call must not continue another one."""
    one = new_session(AgentSessions(Agents(), max_prompt=8, max_tokens=MOST), 0)
    partial = {name: torch.ones(3, dtype=dtype) for name, dtype in COLUMNS.items()}
    one.interrupted = {(5, 0): partial, (5, 1): partial}
    for key, ordinal in ((4, 0), (5, 1), (5, 0)):
        one.add(Wanted(one.task.id, key, ordinal, np.array([1]), 9))
    one.resumed()
    assert [(call.wanted.key, call.wanted.ordinal) for call in one.calls.values()] == [(5, 0), (5, 1), (4, 0)], "the saved order"
    assert [len(call.partial["input_ids"]) for call in one.calls.values()] == [3, 3, 0]
    one.interrupted = {(5, 2): partial}
    with pytest.raises(ValueError, match="tools or template have changed"):
        one.resumed()


def test_prompt_without_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="row 4: its prompt is a text"):
        AgentSessions(Agents(), max_prompt=8, max_tokens=MOST).session(0, Prompt(4, (1,), "", "", None, {}, "text"), 0, False)


def test_metrics_are_means_over_sessions() -> None:
    found = agent_metrics([{"metrics": {"turns": 2.0, "tool/add/calls": 3.0}}, {"metrics": {"turns": 4.0}}])
    assert found == {"agents/turns": 3.0, "agents/turns/max": 4.0, "agents/tool/add/calls": 1.5}
