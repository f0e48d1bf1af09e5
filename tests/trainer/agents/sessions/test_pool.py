"""Agent processes: every message is answered once, and user code that ends, blocks or floods a process costs its own session."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.trainer.agents.sessions.scripted import (
    Model,
    call,
    converse,
    facts,
    sampled,
    script,
    setup,
    task,
)  # fmt: skip
from trainer.agents.sessions import pool as pool_module
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.protocol import Finished, Journal, Settled, Wanted

SECONDS = 3.0
"""Limit of a tool. Starting a process takes most of the time of these tests, and most share a pool."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> AgentSetup:
    return setup(tmp_path_factory.mktemp("agents"), "tools", "stateful", tool_timeout=SECONDS)


@pytest.fixture(scope="module")
def pool(given: AgentSetup) -> Iterator[AgentPool]:
    with AgentPool(given) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def drive(pool: AgentPool, model: Model, sessions: set[int]) -> Iterator[dict[int, Finished]]:
    """Ticks: answer what is wanted, all at once; yields what has finished so far."""
    turns, done = dict.fromkeys(sessions, 0), dict[int, Finished]()
    while sessions - done.keys():
        wait = sorted(sessions - done.keys())
        answers = pool.collect(wait)
        assert [answer.id for answer in answers] == wait
        done |= {answer.id: answer for answer in answers if isinstance(answer, Finished)}
        wanted = [answer for answer in answers if isinstance(answer, Wanted)]
        pool.reply({answer.id: [model(answer, turns[answer.id])] for answer in wanted})
        for answer in wanted:
            turns[answer.id] += 1
        yield done


def finish(pool: AgentPool, lines: Mapping[int, list[str]], **changes: Any) -> dict[int, Finished]:
    pool.start([task(id, prompt=f"ab {id}", **changes) for id in lines])
    *_, done = drive(pool, script(lines), {*lines})
    assert pool.ready(range(1000)) == []
    return done


def alone(given: AgentSetup, lines: Mapping[int, list[str]]) -> dict[int, Any]:
    """Facts of the same sessions, each by itself in this process."""
    loops = AgentLoops(given)
    found = {id: converse(loops, Journal(task(id, prompt=f"ab {id}")), script(lines)) for id in lines}
    return {id: facts(answer) for id, answer in found.items() if isinstance(answer, Finished)}


def good(id: int) -> list[str]:
    return [call("add", a=id), f"{call('later', text='ba')}\n{call('count', by=id)}", call("count", by=1), "end"][id % 3 :]


def test_user_code_that_does_harm_costs_its_own_session_only(pool: AgentPool, given: AgentSetup, folder: Path) -> None:
    lines = {id: good(id) for id in range(6)}
    kinds = {100: "raise", 101: "flood", 102: "fork", 103: "print", 104: "hang", 105: f"once:{folder / 'once'}", 106: "exit"}
    harm = {id: [call("add", a=2), call("harm", how=how), "end"] for id, how in kinds.items()}
    harm[106].insert(1, call("add", a=2))  # after the process has ended once
    deaths = pool.deaths
    done = finish(pool, lines | harm)
    assert {id: facts(done[id]) for id in lines} == alone(given, lines)
    found = {how[:4]: done[id].messages[-2]["content"] for id, how in kinds.items()}
    assert found["rais"].startswith("Error: harm failed: RuntimeError: no network")
    assert found["hang"] == "Error: harm failed: it took more than 3 s"
    assert found["floo"] == "x" * 32 + "...(truncated)..." + "x" * 32
    # One that ended its process once survives by itself, in the process of suspects, and returns.
    assert found["fork"] == found["prin"] == found["once"] == "survived"
    assert pool._quarantine is None or not pool._quarantine.sessions
    check_ended(done[106], "ended with exit code 7")
    assert {id for id in done if "died" in done[id].metrics} == {106}
    assert pool.deaths - deaths == 3


def check_ended(found: Finished, how: str) -> None:
    """It has what it had: three turns, and the results between them."""
    assert found.extra["error"] == f"its agent process {how}" and found.metrics["died"] == 1
    assert found.metrics["turns"] == 3 and not found.finished
    assert found.messages[2]["content"] == "3" and found.extra["tool_rewards"] == [0.5, 0.5]
    assert found.parts[0].response_mask[-1]


@pytest.mark.soak
def test_several_sessions_that_end_their_processes_are_found_among_others(folder: Path) -> None:
    lines = {id: good(id) for id in range(12)}
    kinds = {id: "exit" if id % 2 else "crash" for id in range(100, 104)}
    harm = {id: [call("add", a=2), call("add", a=2), call("harm", how=how)] for id, how in kinds.items()}
    given = setup(folder, "tools", "stateful", workers=2)
    with AgentPool(given) as pool:
        done = finish(pool, lines | harm)
    assert {id: facts(done[id]) for id in lines} == alone(given, lines)
    for id in harm:
        check_ended(done[id], "ended with exit code 7" if id % 2 else "was killed by SIGSEGV")


def test_a_process_that_is_killed_is_replaced_and_nothing_changes(pool: AgentPool, given: AgentSetup) -> None:
    lines = {id: good(id) for id in range(6)}
    pool.start([task(id, prompt=f"ab {id}") for id in lines])
    deaths, done = pool.deaths, dict[int, Finished]()
    for tick, done in enumerate(drive(pool, script(lines), {*lines})):  # noqa: B007
        if tick == 1:  # with turns that it has not answered, and after answers that the pool has
            os.kill(pool._homes[0].pid, signal.SIGKILL)
    assert pool.deaths == deaths + 1
    assert {id: facts(answer) for id, answer in done.items()} == alone(given, lines)


@pytest.mark.soak
def test_a_process_that_a_thread_has_replaced_outlives_the_thread(given: AgentSetup) -> None:
    """Batches are generated ahead in a thread of their own, one per step."""
    with AgentPool(given) as pool:
        finish(pool, {0: good(0)})
        os.kill(pool._homes[0].pid, signal.SIGKILL)
        thread = threading.Thread(target=finish, args=(pool, {1: good(1)}))
        thread.start()
        thread.join()
        assert pool.deaths == 1
        assert {2: facts(finish(pool, {2: good(2)})[2])} == alone(given, {2: good(2)})
        assert pool.deaths == 1


def test_sessions_continue_from_their_journals(pool: AgentPool, given: AgentSetup) -> None:
    lines = {id: good(id) for id in range(6)}
    pool.start([task(id, prompt=f"ab {id}") for id in lines])
    ticks = drive(pool, script(lines), {*lines})
    next(ticks)
    early = dict(next(ticks))
    journals = [pool.journal(id) for id in lines if id not in early]
    # Two turns each, and the results of the first one's calls.
    assert journals and all((len(journal.turns), len(journal.outcomes)) == (2, 1) for journal in journals)
    pool.stop(lines)
    pool.start(journals)
    known = {journal.task.id: len(journal.turns) for journal in journals}
    *_, late = drive(pool, lambda wanted, turn: script(lines)(wanted, known[wanted.id] + turn), {*known})
    assert {id: facts(answer) for id, answer in (early | late).items()} == alone(given, lines)


def test_a_call_that_was_answered_before_and_is_repeated_is_no_answer(given: AgentSetup) -> None:
    pool, anywhere = AgentPool(given), cast(Any, None)
    wanted = Wanted(0, 1, 0, np.zeros(1, dtype=np.int64), 100)
    session = pool._sessions[0] = pool_module._Session(Journal(task(0)))
    pool._take(anywhere, session, 0, wanted)
    assert session.owed and session.journal.waits == [(1, 0)], "it may make other calls"
    pool._take(anywhere, session, 0, Settled())
    assert not session.owed and pool.collect([0]) == [wanted]
    pool.reply({0: [sampled(wanted, "ab"), sampled(replace(wanted, key=2), "ab")]})
    assert session.owed and len(session.journal.turns) == 1 and not session.journal.waits
    for message in (wanted, Settled()):  # the process was replaced, and does not have the turn yet
        pool._take(anywhere, session, 0, message)
    assert session.owed and not pool._answers
    pool._take(anywhere, session, 1, Settled())
    assert not session.owed and pool.collect([0]) == []


def test_late_calls_are_collected_with_those_of_others_but_never_before_an_answer_that_is_due(given: AgentSetup) -> None:
    pool, anywhere = AgentPool(given), cast(Any, None)
    first, late, third = (Wanted(0, key, 0, np.zeros(1, dtype=np.int64), 100) for key in (1, 2, 3))
    session = pool._sessions[0] = pool_module._Session(Journal(task(0)))
    for message in (first, Settled()):
        pool._take(anywhere, session, 0, message)
    assert pool.collect([0]) == [first]
    pool._take(anywhere, session, 0, late)
    assert pool.collect([], [7]) == [] and pool.collect([], [0]) == [late], "of the flow that has the session"
    pool.reply({0: [sampled(first, "ab")]})
    pool._take(anywhere, session, 1, third)
    assert pool.collect([], [0]) == [], "it belongs to the answer"
    pool._take(anywhere, session, 1, Settled())
    assert pool.collect([], [0]) == [] and pool.collect([0]) == [third]
    assert session.journal.waits == [(2, 0), (3, 0)]


def test_a_process_with_threads_left_behind_is_replaced_between_messages(
    pool: AgentPool, given: AgentSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.wait_ready()
    monkeypatch.setattr(pool_module, "_MOST_HUNG", pool._homes[0].hung + 1)
    lines = {id: [call("harm", how="hang"), call("add", a=1), "end"] for id in range(2)} | {2: good(2)}
    pid, deaths = pool._homes[0].pid, pool.deaths
    done = finish(pool, lines)
    assert pool._homes[0].pid != pid and pool.deaths == deaths
    assert [done[id].metrics["calls/timeout"] for id in range(2)] == [1, 1]
    assert [done[id].messages[-2]["content"] for id in range(2)] == ["2", "2"]
    assert facts(done[2]) == alone(given, {2: good(2)})[2]


@pytest.mark.soak
def test_a_process_that_gives_no_sign_of_life_is_replaced(
    pool: AgentPool, given: AgentSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_STALL_LIMIT", 2.0)
    lines = {id: good(id) for id in range(3)}
    pool.start([task(id, prompt=f"ab {id}") for id in lines])
    deaths, done = pool.deaths, dict[int, Finished]()
    for tick, done in enumerate(drive(pool, script(lines), {*lines})):  # noqa: B007
        if tick == 0:
            os.kill(pool._homes[0].pid, signal.SIGSTOP)
    assert pool.deaths == deaths + 1
    assert {id: facts(answer) for id, answer in done.items()} == alone(given, lines)


LOOP = """
import threading

async def run(session):
    if session.task.id == 1:
        threading.Event().wait()
    await session.sample()
    return 1.0
"""


@pytest.mark.soak
def test_a_loop_that_never_answers_is_ended_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own.py").write_text(LOOP)
    monkeypatch.setattr(pool_module, "_SLACK", 0.0)
    monkeypatch.setattr(pool_module, "_CALLS", 1)
    given = setup(folder, loop=f"{folder}/own.py:run", tool_timeout=0.5)
    with AgentPool(given) as pool:
        done = finish(pool, {0: ["end"], 1: ["end"]})
        assert pool.deaths == 2
    assert done[0].reward == 1.0 and "error" not in done[0].extra
    assert "did not answer" in done[1].extra["error"] and "sessions 1 " in done[1].extra["error"]
    assert not done[1].parts[0].response_mask.any() and done[1].parts[0].prompt_length == len(done[1].parts[0].input_ids)


def test_files_that_do_not_load_are_an_error_in_one_line(folder: Path) -> None:
    with AgentPool(setup(folder, format="none")) as pool, pytest.raises(ValueError, match=r"^multi_turn.format=none: [^\n]*$"):
        pool.wait_ready()


@pytest.mark.soak
def test_a_process_that_does_not_start_is_an_error(folder: Path) -> None:
    (folder / "stops.py").write_text("import os\nos._exit(3)\n")
    given = setup(folder, function_tool_path=str(folder / "stops.py"))
    with AgentPool(given) as pool, pytest.raises(RuntimeError, match=r"did not start: it ended with exit code 3"):
        pool.wait_ready()


def test_a_session_that_cannot_be_trained_on_is_an_error_of_the_run(pool: AgentPool) -> None:
    pool.start([task(3, max_prompt=5)])
    with pytest.raises(ValueError, match=r"^data.max_prompt_length=5: a prompt has \d+ tokens [^\n]* session 3[^\n]*$"):
        pool.collect([3])
    pool.stop([3])


def test_stopped_sessions_answer_no_more_and_their_ids_can_be_used_again(pool: AgentPool, given: AgentSetup) -> None:
    pool.start([task(id, prompt=f"ab {id}") for id in range(4)])
    pool.collect(range(4))
    pool.stop([0, 1])
    pool.start([task(0, prompt="ab 0")])
    pool.start([task(9, prompt="ab 9")])
    pool.stop([9])
    with pytest.raises(KeyError):
        pool.journal(1)
    *_, done = drive(pool, script({0: good(0)}), {0})
    assert facts(done[0]) == alone(given, {0: good(0)})[0]
    pool.stop([2, 3])
    assert pool.ready(range(1000)) == []


def test_answers_are_there_as_soon_as_they_are_given(pool: AgentPool) -> None:
    pool.start([task(0), task(1)])
    found: list[Any] = []
    while len(found) < 2:
        found += pool.ready([0, 1], 60.0)
    assert {answer.id for answer in found} == {0, 1} and pool.ready([0, 1], 0.01) == []
    first = next(answer for answer in found if answer.id == 0)
    pool.reply({0: [sampled(first, "end")]})
    (answer,) = pool.ready([0], 60.0)
    assert isinstance(answer, Finished) and answer.id == 0
    pool.stop([1])


def test_a_thousand_sessions_at_once(pool: AgentPool) -> None:
    lines = {id: [call("later", text=f"ab {id}"), "end"] for id in range(1_000)}
    done = finish(pool, lines)
    assert len(done) == 1_000 and all(done[id].messages[2]["content"] == f"ab {id}" for id in lines)
    assert all(answer.metrics["turns"] == 2 for answer in done.values())


@pytest.mark.soak
def test_the_end_of_a_pool_is_the_end_of_its_processes_and_of_what_they_started(folder: Path) -> None:
    with AgentPool(setup(folder, "tools", workers=2)) as pool:
        pool.start([task(0)])
        (wanted,) = pool.collect([0])
        assert isinstance(wanted, Wanted)
        pool.reply({0: [sampled(wanted, call("harm", how="fork"))]})
        pool.collect([0])
        pids = [process.pid for process in pool._homes]
    for pid in pids:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"group {pid} is alive")


def test_the_collector_leaves_imported_modules_alone(folder: Path) -> None:
    """Going through them takes 40 % of a turn's CPU time."""
    (folder / "own.py").write_text(
        "import gc\nfrom trainer.agents.tools import tool\n\n"
        '@tool\ndef collector() -> str:\n    """Facts."""\n'
        "    return f'{gc.isenabled()} {gc.get_freeze_count() > 10_000} {gc.get_threshold()[0]}'\n"
    )
    with AgentPool(setup(folder, function_tool_path=str(folder / "own.py"))) as pool:
        done = finish(pool, {0: [call("collector"), "end"]})
    assert done[0].messages[2]["content"] == "True True 10000"
