"""Sessions of a record: the calls, rows and facts of the sessions that were recorded, without user code."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tests.trainer.agents.families import QWEN3, QWEN25, Family
from tests.trainer.agents.sessions.scripted import Model, call, converse, facts, sampled, setup, task
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Task, Wanted
from trainer.agents.sessions.recorded_sessions import RecordedAgents, RecordedSessions, record_of
from trainer.agents.sessions.session_flow import finished_rows
from trainer.data.dataset import Prompt
from trainer.tracking.batch_file import load_batch, load_sessions, save_batch
from workers.batch import Batch

BRANCHES = """
async def run(session):
    first = [*session.messages]
    await session.sample()
    session.messages.append({"role": "user", "content": "more"})
    await session.sample()
    session.messages[:] = first
    await session.sample()
    session.messages.append({"role": "user", "content": "other"})
    reply = await session.sample()
    session.finished = not reply.truncated
    return 0.25
"""
# Both second turns continue the first one; the last call has fewer messages than those before it, so its row is the first.
FORKS = """
async def run(session):
    session.messages.append({"role": "user", "content": "again"})
    await session.sample()
    first = [*session.messages]
    for text in ("more", "other"):
        session.messages[:] = [*first, {"role": "user", "content": text}]
        await session.sample()
    session.messages[:] = [{"role": "user", "content": "anew"}]
    reply = await session.sample()
    session.finished = not reply.truncated
"""
Made = tuple[Finished, list[Wanted], Model]


def run(loops: AgentLoops, lines: list[str], family: Family = QWEN25) -> Made:
    """A session that runs user code; its calls."""
    calls: list[Wanted] = []

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        return sampled(wanted, lines[turn] if turn < len(lines) else "end", family=family)

    def listened(wanted: Wanted, turn: int) -> SampledTurn:
        calls.append(wanted)
        return model(wanted, turn)

    found = converse(loops, Journal(task()), listened)
    assert isinstance(found, Finished)
    return found, calls, model


def tools(folder: Path) -> Made:
    return run(AgentLoops(setup(folder, "tools", "stateful")), [call("add", a=1), call("count", by=2), "<tool_call>{", "3"])


def parts(folder: Path) -> Made:
    """A template that drops thinking: a row per turn."""
    lines = ["<think>\nab\n</think>\n\none", "<think>\nba\n</think>\n\ntwo"]
    return run(AgentLoops(setup(folder, "user", family=QWEN3)), lines, QWEN3)


def branches(folder: Path) -> Made:
    (folder / "own.py").write_text(BRANCHES)
    return run(AgentLoops(setup(folder, loop=f"{folder}/own.py:run")), ["one", "two", "three", "four"])


def forks(folder: Path) -> Made:
    (folder / "own.py").write_text(FORKS)
    return run(AgentLoops(setup(folder, loop=f"{folder}/own.py:run")), ["one", "two", "three", "four"])


def nothing(folder: Path) -> Made:
    """A session without a turn: a budget of 0 tokens."""
    loops = AgentLoops(setup(folder, "tools"))
    found = converse(loops, Journal(task(max_tokens=0)), lambda wanted, turn: pytest.fail("no turn has room"))
    assert isinstance(found, Finished)
    return found, [], lambda wanted, turn: pytest.fail("no turn has room")


def recorded(folder: Path, *found: Finished) -> RecordedAgents:
    """From the file of a dump. The seed of a session is 100 + its place."""
    rows = [finished_rows(place, one, seed=100 + place, restarted=False) for place, one in enumerate(found)]
    batch = Batch(torch.tensor([1]), {"input_ids": torch.tensor([7])}, {"uid": torch.tensor([3])})
    path = save_batch(folder / "step_1.safetensors", batch, {"step": 1}, record_of(rows))
    assert load_batch(path)[0].tokens.keys() == {"input_ids"}, "the batch of the step is as before"
    record = load_sessions(path)
    assert record is not None
    return RecordedAgents(record)


def begun(agents: RecordedAgents, seed: int) -> int:
    """A new session; returns its id."""
    sessions = RecordedSessions(agents, max_prompt=9, max_tokens=9)
    sessions._n = Random(seed).randrange(1000)
    session = sessions.session(0, Prompt(4, (1,), "", "", None, {}, [{"role": "user", "content": ""}]), seed, greedy=False)
    agents.start([session.task])
    return session.task.id


def repeat(agents: RecordedAgents, id: int, model: Model) -> tuple[Finished, list[Wanted]]:
    calls: list[Wanted] = []
    while isinstance((answer := agents.collect([id])[0]), Wanted):
        agents.reply({id: [model(answer, len(calls))]})
        calls.append(answer)
    return answer, calls


def identity(wanted: Wanted) -> tuple[int, int, bytes, int]:
    return wanted.key, wanted.ordinal, wanted.prompt_ids.tobytes(), wanted.max_tokens


@pytest.mark.parametrize("make", [tools, parts, branches, forks, nothing])
def test_repeated_session_makes_the_same_calls_and_rows(make: Callable[[Path], Made], tmp_path: Path) -> None:
    found, calls, model = make(tmp_path)
    agents = recorded(tmp_path, tools(tmp_path)[0], found)
    id = begun(agents, 101)
    again, asked = repeat(agents, id, model)
    assert [*map(identity, asked)] == [*map(identity, calls)]
    then = [*facts(found)]
    then[1] = then[1].replace(f"[{found.id},", f"[{id},", 1)
    assert [*facts(again)] == then and again.turns == found.turns
    assert len(found.parts) == {tools: 1, parts: 2, branches: 2, forks: 3, nothing: 1}[make]
    agents.stop([id])
    assert agents.sessions == {}


def test_log_probs_are_those_that_are_sampled_now(tmp_path: Path) -> None:
    found, _, model = branches(tmp_path)
    agents = recorded(tmp_path, found)

    def other(wanted: Wanted, turn: int) -> SampledTurn:
        one = model(wanted, turn)
        return SampledTurn(one.key, one.ordinal, one.token_ids, one.log_probs - 1, one.versions + 2, one.finish_reason)

    again, _ = repeat(agents, begun(agents, 100), other)
    for then, now in zip(found.parts, again.parts, strict=True):
        mask = then.response_mask
        assert np.array_equal(now.rollout_log_probs, np.where(mask, then.rollout_log_probs - 1, 0))
        assert np.array_equal(now.weight_version, np.where(mask, then.weight_version + 2, -1))


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("make", [tools, branches, forks])
def test_turn_that_differs_ends_the_session(at: int, make: Callable[[Path], Made], tmp_path: Path) -> None:
    found, calls, model = make(tmp_path)
    agents = recorded(tmp_path, found)

    def other(wanted: Wanted, turn: int) -> SampledTurn:
        return sampled(wanted, "another") if turn == at else model(wanted, turn)

    again, asked = repeat(agents, begun(agents, 100), other)
    assert [*map(identity, asked)] == [*map(identity, calls[: at + 1])] and not again.finished
    place, now = found.turns[at], sampled(calls[at], "another")
    (last,) = (part for part in again.parts if np.array_equal(part.input_ids[place.start :], now.token_ids))
    assert last.input_ids.tolist() == [*calls[at].prompt_ids.tolist(), *now.token_ids.tolist()]
    assert last.response_mask[place.start :].all() and np.array_equal(last.rollout_log_probs[place.start :], now.log_probs)
    n = sum(one.end - one.start for one in found.turns[:at]) + len(now.token_ids)
    assert sum(part.response_mask.sum() for part in again.parts) == n, "what follows is not there"
    assert again.reward == found.reward and again.extra == found.extra


def test_unknown_session_is_refused_in_one_line(tmp_path: Path) -> None:
    agents = recorded(tmp_path, tools(tmp_path)[0])
    with pytest.raises(
        ValueError, match=r"^trainer.replay.mode=rollout: the dump has no conversation of row 4 [^\n]*mode=train$"
    ):
        begun(agents, 101)
    with pytest.raises(AssertionError, match="nothing is in flight"):
        agents.start([Task(1, [], "", "", {}, None, 9, 9)])


def test_dump_without_conversations_has_no_record(tmp_path: Path) -> None:
    assert record_of([]) is None
    batch = Batch(torch.tensor([1]), {"input_ids": torch.tensor([7])})
    assert load_sessions(save_batch(tmp_path / "step_1.safetensors", batch, {})) is None
