"""Environments: their outcomes are journaled and repeated, and what their code does ends their own session only."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from trainer.agents.environments import Environment, EnvironmentSession, EnvironmentStep, load_environment, restoration
from trainer.agents.isolation import SessionLoop
from trainer.agents.messages import Message
from trainer.agents.native.gym_environment import GymEnvironment
from trainer.agents.sessions.protocol import Task

TASK = Task(0, [{"role": "system", "content": "Guess."}], "games", 3, {"index": 0}, None, 64, 64)


def turn(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Counting(Environment):
    """Ends at the third turn; rewards are 1, 2, 3."""

    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.n = 0

    async def reset(self, task: Task) -> list[Message]:
        self.calls.append("reset")
        task.prompt.append({"role": "user", "content": f"below {task.ground_truth}"})
        return task.prompt

    def step(self, message: Message) -> Any:
        self.n += 1
        self.calls.append(f"step {message['content']}")
        message["content"] = "changed"
        return f"{self.n} turns", self.n, self.n == 3, {"n": self.n}

    def close(self) -> None:
        self.calls.append("close")


class PureCounting(Counting):
    pure = True


class StoredCounting(Counting):
    def state(self) -> Any:
        return {"n": self.n}

    async def load(self, state: Any) -> None:
        self.calls.append("load")
        self.n = state["n"]


Body = Callable[[EnvironmentSession], Awaitable[Any]]


def use(environment: type[Environment], body: Body, *, seconds: float = 60.0) -> tuple[Any, EnvironmentSession]:
    async def main() -> tuple[Any, EnvironmentSession]:
        loop = SessionLoop()
        try:
            async with EnvironmentSession(environment, loop, seconds=seconds) as session:
                return await body(session), session
        finally:
            loop.close()

    return asyncio.run(main())


def of(value: Any, method: str = "step") -> type[Environment]:
    """An environment whose method returns this."""
    found: dict[str, Any] = {"reset": lambda self, task: "go", "step": lambda self, message: ("on", 0.0, False, {})}
    return type("Own", (Environment,), found | {method: lambda self, argument: value() if callable(value) else value})


async def play(session: EnvironmentSession, turns: int = 3) -> tuple[list[Message], list[EnvironmentStep], list[Any]]:
    first = await session.reset(TASK)
    steps, outcomes = [], [session.outcome]
    for i in range(turns):
        steps.append(await session.step(turn(f"turn {i}")))
        outcomes.append(session.outcome)
    return first, steps, outcomes


def test_messages_rewards_and_info_reach_the_session() -> None:
    Counting.calls.clear()
    (first, steps, outcomes), session = use(Counting, play)
    assert first == [*TASK.prompt, {"role": "user", "content": "below 3"}] and len(TASK.prompt) == 1
    assert [step.messages for step in steps] == [[{"role": "user", "content": f"{n} turns"}] for n in (1, 2, 3)]
    assert session.rewards == [1.0, 2.0, 3.0] and [step.done for step in steps] == [False, False, True]
    assert session.info == {"n": 3} and session.error is None and not session.counts
    assert Counting.calls == ["reset", "step turn 0", "step turn 1", "step turn 2", "close"]
    assert json.loads(json.dumps(outcomes)) == outcomes


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("environment", [PureCounting, StoredCounting])
def test_a_repeated_session_continues_as_the_first_did(environment: type[Environment], done: int) -> None:
    (first, steps, outcomes), whole = use(environment, play)
    Counting.calls.clear()

    async def again(session: EnvironmentSession) -> Any:
        session.repeat(json.loads(json.dumps(outcomes[:done])))
        found = await session.reset(TASK), [await session.step(turn(f"turn {i}")) for i in range(max(0, done - 1))]
        assert not done or not Counting.calls, "outcomes of the journal run no user code"
        return *found, [await session.step(turn(f"turn {i}")) for i in range(max(0, done - 1), 3)]

    (repeated_first, repeated, continued), session = use(environment, again)
    assert (repeated_first, repeated + continued) == (first, steps)
    assert session.rewards == whole.rewards and session.info == whole.info and session.outcome == outcomes[-1]
    assert not session.counts
    kept = [f"step turn {i}" for i in range(3)]
    rebuilt = ["reset", *kept] if environment is PureCounting or not done else ["load", *kept[done - 1 :]]
    assert Counting.calls == [*rebuilt, "close"]


def test_a_finished_journal_runs_no_user_code() -> None:
    (first, steps, outcomes), _ = use(PureCounting, play)
    Counting.calls.clear()

    async def again(session: EnvironmentSession) -> Any:
        session.repeat(outcomes)
        return (await play(session))[:2]

    found, session = use(PureCounting, again)
    assert found == (first, steps) and session.rewards == [1.0, 2.0, 3.0] and Counting.calls == []


def test_an_opaque_environment_does_not_continue_after_its_journal() -> None:
    assert [restoration(cls) for cls in (Counting, PureCounting, StoredCounting)] == ["opaque", "pure", "state"]
    (_, _, outcomes), _ = use(Counting, play)

    async def again(session: EnvironmentSession) -> Any:
        session.repeat(outcomes[:2])
        return await play(session)

    (_, steps, _), session = use(Counting, again)
    assert [step.done for step in steps][-1] and session.rewards == [1.0]
    assert "neither pure nor has it state and load" in (session.error or "") and session.counts == {"error": 1}


def test_results_of_the_journal_count_where_a_pure_environment_is_not() -> None:
    (_, _, outcomes), _ = use(PureCounting, play)
    outcomes[1] |= {"reward": 7.0, "info": {"n": 70}}

    async def again(session: EnvironmentSession) -> Any:
        session.repeat(outcomes[:2])
        return await play(session)

    (_, steps, _), session = use(PureCounting, again)
    assert steps[0].reward == 7.0 and session.rewards == [7.0, 2.0, 3.0] and session.counts == {"differs": 1}


def raised() -> Any:
    raise KeyError("no such room")


WRONG = [
    ("step", None, "step returned None; step returns (messages, reward, done, info)"),
    ("step", ("a", 0.0, False, False, {}), "step returned a tuple of 5; step returns"),
    ("step", ("a", "1", False, {}), "the reward '1'; it is a finite number"),
    ("step", ("a", float("nan"), False, {}), "the reward nan"),
    ("step", ("a", 0.0, 0, {}), "int 0 for done; it is True or False"),
    ("step", ("a", 0.0, False, []), "list [] for info; it is a dict"),
    ("step", ("a", 0.0, False, {"at": object}), "what is not JSON"),
    ("step", ([], 0.0, False, {}), "no messages, and done is False"),
    ("step", (3, 0.0, False, {}), "int 3 for messages; they are a text, or a list of OpenAI messages"),
    ("step", ([{"content": "a"}], 0.0, False, {}), "as message 0; a message is a dict with role and content"),
    ("step", ([{"role": "user", "content": [1]}], 0.0, False, {}), "the content of message 0; only text"),
    ("step", ("a" * 2_000_000, 0.0, False, {}), "at most 1,000,000"),
    ("step", raised, "KeyError: 'no such room'"),
    ("step", exit, "SystemExit"),
    ("reset", None, "reset returned None for messages"),
    ("reset", "", "no messages; it returns at least one"),
]


@pytest.mark.parametrize(("method", "value", "expected"), WRONG, ids=[text[:40] for _, _, text in WRONG])
def test_wrong_values_end_the_session_in_one_line(method: str, value: Any, expected: str) -> None:
    environment = of(value, method)
    (_, steps, outcomes), session = use(environment, lambda session: play(session, 2))
    assert session.error is not None and expected in session.error and f"environment Own.{method}: " in session.error
    assert "\n" not in session.error and len(session.error) < 300
    assert all(step == EnvironmentStep([], 0.0, True, {"error": session.error}) for step in steps)
    assert session.rewards == [] and session.counts == {"error": 1} and json.loads(json.dumps(outcomes)) == outcomes

    async def again(other: EnvironmentSession) -> Any:
        other._how = "pure"
        other.repeat(outcomes[: 1 if method == "reset" else 2])
        return (await play(other, 2))[1]

    repeated, other = use(environment, again)
    assert repeated == steps and other.error == session.error and not other.counts


def test_what_hangs_costs_its_own_session_only() -> None:
    hang = threading.Event()

    async def main() -> Any:
        loops = [SessionLoop(), SessionLoop()]
        try:
            async with (
                EnvironmentSession(of(hang.wait), loops[0], seconds=0.2) as stuck,
                EnvironmentSession(Counting, loops[1], seconds=60.0) as other,
            ):
                return await asyncio.gather(play(stuck, 1), play(other)), stuck, other
        finally:
            hang.set()
            for loop in loops:
                loop.close()

    ((_, _), stuck, other) = asyncio.run(main())
    assert stuck.error is not None and "it took more than 0.2 s" in stuck.error and stuck.counts == {"timeout": 1}
    assert other.error is None and other.rewards == [1.0, 2.0, 3.0]


def test_halves_of_characters_and_numpy_do_not_reach_the_journal() -> None:
    (_, steps, _), session = use(of(("a\ud800", np.float32(1), np.True_, {})), lambda session: play(session, 1))
    assert steps == [EnvironmentStep([{"role": "user", "content": "a?"}], 1.0, True, {})] and session.error is None


def test_an_environment_is_closed_when_its_session_is_cancelled() -> None:
    Counting.calls.clear()

    async def body(session: EnvironmentSession) -> Any:
        await session.reset(TASK)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        use(Counting, body)
    assert Counting.calls == ["reset", "close"]


FILE = """
from trainer.agents.environments import Environment

class Whole(Environment):
    def reset(self, task): return "go"
    async def step(self, message): return "on", 1.0, True, {}

class NoStep(Environment):
    def reset(self, task): return "go"

class Half(Whole):
    def state(self): return 1

class Other: pass
"""


def test_environments_are_loaded_from_files(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(FILE)
    environment = load_environment(f"{file}:Whole", "key")
    (_, steps, _), _ = use(environment, lambda session: play(session, 1))
    assert steps == [EnvironmentStep([{"role": "user", "content": "on"}], 1.0, True, {})]
    wrong = {
        f"{file}": "it must be path/to/file.py:Class",
        f"{tmp_path}/none.py:Whole": f"no such file; {tmp_path} has game.py",
        f"{file}:Missing": r"has no subclass Missing of trainer\S+Environment; it has Whole, NoStep, Half",
        f"{file}:Other": "has no subclass Other",
        f"{file}:NoStep": "NoStep has no method step",
        f"{file}:Half": "only one of the methods state and load",
    }
    for name, expected in wrong.items():
        with pytest.raises(ValueError, match=expected) as caught:
            load_environment(name, "key")
        assert str(caught.value).startswith(f"key={name}: ") and "\n" not in str(caught.value)
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match=r"broken.py does not load: ModuleNotFoundError.*\(broken.py:1\)"):
        load_environment(f"{broken}:Whole", "key")


class Corridor:
    """In the form of Gymnasium: walk right to the end."""

    def __init__(self, length: int) -> None:
        self.at, self.length, self.steps, self.closed = 0, length, 0, False

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "You are at 0.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.at += action.strip() == "right"
        return f"You are at {self.at}.", float(self.at == self.length), self.at == self.length, self.steps == 4, {"at": self}

    def close(self) -> None:
        self.closed = True


class CorridorEnvironment(GymEnvironment):
    made: ClassVar[list[Corridor]] = []

    def make(self, task: Task) -> Corridor:
        self.made.append(Corridor(task.ground_truth))
        return self.made[-1]


@pytest.mark.parametrize(("action", "done", "reward"), [(" right", 3, 1.0), ("left", 4, 0.0)])
def test_environments_of_gymnasium_run(action: str, done: int, reward: float) -> None:
    async def body(session: EnvironmentSession) -> Any:
        first, steps = await session.reset(TASK), [await session.step(turn(action))]
        while not steps[-1].done:
            steps.append(await session.step(turn(action)))
        return first, steps

    (first, steps), session = use(CorridorEnvironment, body)
    assert first == [*TASK.prompt, {"role": "user", "content": "You are at 0."}]
    assert len(steps) == done and session.rewards == [0.0] * (done - 1) + [reward] and session.error is None
    at = 3 if reward else 0
    assert steps[-1].messages == [{"role": "user", "content": f"You are at {at}."}]
    assert steps[-1].info["truncated"] is (done == 4) and "Corridor object" in steps[-1].info["at"]
    assert CorridorEnvironment.made[-1].closed
