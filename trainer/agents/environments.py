"""Environments: the user's code that gives a session its first messages, and replies to the turns of the model.

A session must continue after a crash, and at a resume, where it was. Every outcome of an environment is JSON and is journaled; a
repeated session gets its outcomes from the journal, without user code. Only when the session calls the environment again must the
state be there, and how it is rebuilt is the environment's choice (``Restoration``).
"""

from __future__ import annotations

import inspect
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from trainer.agents.arguments import Schema, check_json
from trainer.agents.isolation import SessionLoop, UserCodeError, completed, to_the_end
from trainer.agents.messages import Message
from trainer.rewards.scoring import finite
from trainer.run.user_code import check_file, describe, load_module

Restoration = Literal["pure", "state", "opaque"]
_MOST_CHARACTERS = 1_000_000
"""Of an outcome: it is tokenised, sent to the controller and part of checkpoints."""
_STEP = "step returns (messages, reward, done, info)"


class EnvironmentStep(NamedTuple):
    """Reply to a turn. messages: what the model sees next, a list or a text. reward: of the turn. done: the session ends.

    info: other values, JSON.
    """

    messages: list[Message] | str
    reward: float
    done: bool
    info: dict[str, Any]


class Environment:
    """Base class of environments; one object, made without arguments, per session. Methods may be sync or async.

    pure: the state follows from the task and the messages alone, and is rebuilt by repeating the calls. Otherwise it is journaled
    if the class has ``state`` and ``load``. Without them the environment is opaque: its session starts again after a resume.
    tools: OpenAI function schemas for the chat template; reset may set them.
    """

    pure: ClassVar[bool] = False
    tools: Sequence[Schema] = ()

    def reset(self, task: Any) -> Any:
        """First messages, a list or a text. task: a copy of trainer.agents.sessions.protocol.Task."""
        raise TypeError(f"{type(self).__name__} has no method reset")

    def step(self, message: Message) -> Any:
        """EnvironmentStep, or a tuple of its fields. message: the turn of the model, as in OpenAI's chat completions."""
        raise TypeError(f"{type(self).__name__} has no method step")

    def state(self) -> Any:
        """The state, JSON."""
        raise TypeError(f"{type(self).__name__} has no method state")

    def load(self, state: Any) -> Any:
        """Continue from a state, on a new object and instead of reset."""
        raise TypeError(f"{type(self).__name__} has no method load")

    def close(self) -> Any:
        """End the session; called in any case."""


def restoration(environment: type[Environment]) -> Restoration:
    """How the state of the environment is rebuilt after a resume."""
    if environment.pure:
        return "pure"
    return "opaque" if environment.state is Environment.state else "state"


def load_environment(name: str, key: str) -> type[Environment]:
    """Load an environment, path/to/file.py:Class. key: configuration key for errors. Raises ValueError, one line."""
    key = f"{key}={name}"
    path, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(f"{key}: it must be path/to/file.py:Class")
    file = check_file(path, key)
    try:
        module = load_module(file)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{key}: {file.name} does not load: {describe(error)}") from error
    found = vars(module).get(attribute)
    if not isinstance(found, type) or not issubclass(found, Environment):
        own = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        there, base = ", ".join(own) or "none", f"{Environment.__module__}.Environment"
        raise ValueError(f"{key}: {file.name} has no subclass {attribute} of {base}; it has {there}")
    for method, inherited in ((found.reset, Environment.reset), (found.step, Environment.step)):
        if method is inherited:
            raise ValueError(f"{key}: {attribute} has no method {inherited.__name__}")
    if (found.state is Environment.state) != (found.load is Environment.load):
        raise ValueError(f"{key}: {attribute} has only one of the methods state and load; write both, or neither")
    return found


class EnvironmentSession:
    """A session of an environment, a context manager: calls its methods with a time limit, and always closes it.

    Nothing that user code does is raised. rewards: of each turn so far. info: of the last call. tools: after reset. error: why
    the environment cannot continue, one line; the session then ends. outcome: of the last call, JSON for the journal. counts:
    "error", "timeout"; "differs": calls of a pure environment that returned something else when they were repeated.
    """

    def __init__(self, environment: type[Environment], loop: SessionLoop, *, seconds: float) -> None:
        """seconds: limit of a call."""
        self.rewards: list[float] = []
        self.info: dict[str, Any] = {}
        self.tools: list[Schema] = []
        self.error: str | None = None
        self.outcome: Any = None
        self.counts: Counter[str] = Counter()
        self._class, self._loop, self._seconds = environment, loop, seconds
        self._how = restoration(environment)
        self._environment: Environment | None = None
        self._journal: deque[Any] = deque()
        self._repeated: list[tuple[Any, Any]] = []
        """(Argument of a call, its outcome) of the calls so far that user code has not run."""

    def repeat(self, outcomes: Sequence[Any]) -> None:
        """Let the next calls return these outcomes of an earlier process, without user code.

        An opaque environment cannot continue after them: the call that follows is an error.
        """
        self._journal.extend(outcomes)

    async def reset(self, task: Any) -> list[Message]:
        """First messages; none if ``error`` is set."""
        found = await self._outcome("reset", task)
        return found.get("messages", [])

    async def step(self, message: Message) -> EnvironmentStep:
        """Reply to a turn of the model. After an error: done, without messages."""
        found = await self._outcome("step", message)
        if "error" in found:
            return EnvironmentStep([], 0.0, True, {"error": found["error"]})
        self.rewards.append(found["reward"])
        return EnvironmentStep(found["messages"], found["reward"], found["done"], found["info"])

    async def _outcome(self, method: str, argument: Any) -> Any:
        argument = deepcopy(argument)  # the user's own: it may be changed
        if self._journal:
            found = self._journal.popleft()
            self._repeated.append((argument, found))
        elif self.error is not None:
            return {"environment": method, "error": self.error}
        else:
            try:
                await self._restore()
                found = await self._run(method, argument)
            except UserCodeError as error:
                self.counts["timeout" if error.late else "error"] += 1
                found = {"environment": method, "error": f"environment {self._class.__name__}.{method}: {error}"}
        # A copy: messages are added to the conversation, which programs may change.
        self.outcome, found = found, deepcopy(found)
        self.error = found.get("error")
        self.info = found.get("info", self.info)
        self.tools = found.get("tools", self.tools)
        return found

    async def _restore(self) -> None:
        """Rebuild the state after repeated calls."""
        if self._environment is not None:
            return
        self._environment = await self._loop.run(self._made, seconds=self._seconds)
        repeated, self._repeated = self._repeated, []
        if repeated and self._how == "opaque":
            raise UserCodeError("its process has ended, and it is neither pure nor has it state and load")
        if repeated and self._how == "state":
            await self._call(self._environment.load, lambda value: value, deepcopy(repeated[-1][1]["state"]))
        for argument, before in repeated if self._how == "pure" else ():
            if await self._run(before["environment"], argument) != before:
                self.counts["differs"] += 1

    def _made(self) -> Environment:
        return self._class()

    async def _run(self, method: str, argument: Any) -> Any:
        environment = self._environment
        assert environment is not None, "_restore makes it"
        if method == "reset":
            found = await self._call(environment.reset, lambda value: _first(value, environment.tools), argument)
        else:
            found = await self._call(environment.step, _replied, argument)
        if self._how == "state":
            found["state"] = await self._call(environment.state, lambda value: _plain(value, "state"))
        return found

    async def _call(self, method: Callable[..., Any], check: Callable[[Any], Any], *args: Any) -> Any:
        """What ``check`` makes of the returned value, in the user's thread: it may be large. Raises UserCodeError."""

        def checked(value: Any) -> tuple[Any, str | None]:
            try:
                return check(value), None
            except ValueError as error:
                return None, str(error)

        async def awaited() -> tuple[Any, str | None]:
            return checked(await method(*args))

        call = awaited if inspect.iscoroutinefunction(method) else lambda: checked(completed(method(*args)))
        found, wrong = await self._loop.run(call, seconds=self._seconds)
        if wrong is not None:
            raise UserCodeError(wrong)
        return found

    async def __aenter__(self) -> EnvironmentSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await to_the_end(self._close())

    async def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None and self._class.close is not Environment.close:
            try:
                await self._loop.run(environment.close, seconds=self._seconds)
            except UserCodeError as error:
                self.counts["timeout" if error.late else "error"] += 1


def _first(value: Any, tools: Any) -> dict[str, Any]:
    messages = _messages(value, "reset")
    if not messages:
        raise ValueError("reset returned no messages; it returns at least one")
    return _plain({"environment": "reset", "messages": messages, "tools": [*tools]}, "reset")


def _replied(value: Any) -> dict[str, Any]:
    if not isinstance(value, tuple) or len(value) != 4:
        what = f"a tuple of {len(value)}" if isinstance(value, tuple) else _kind(value)
        raise ValueError(f"step returned {what}; {_STEP}")
    messages, reward, done, info = value
    number = finite(reward)
    if number is None:
        raise ValueError(f"step returned the reward {reward!r:.60}; it is a finite number")
    if not isinstance(done, bool | np.bool_):
        raise ValueError(f"step returned {_kind(done)} for done; it is True or False")
    if not isinstance(info, Mapping):
        raise ValueError(f"step returned {_kind(info)} for info; it is a dict")
    found = _messages(messages, "step")
    if not found and not done:
        raise ValueError("step returned no messages, and done is False; the model needs a message that it can reply to")
    return _plain({"environment": "step", "messages": found, "reward": number, "done": bool(done), "info": dict(info)}, "step")


def _messages(value: Any, method: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list | tuple):
        raise ValueError(f"{method} returned {_kind(value)} for messages; they are a text, or a list of OpenAI messages")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{method} returned {_kind(message)} as message {i}; a message is a dict with role and content")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{method} returned {_kind(content)} for the content of message {i}; only text is supported")
    return [dict(message) for message in value]


def _plain(value: Any, method: str) -> Any:
    """The value as JSON has it. Raises ValueError if it has no JSON, or too much."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{method} returned what is not JSON: {error}") from error
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{method} returned {len(text):,} characters; at most {_MOST_CHARACTERS:,} are supported")
    # Environments may return halves of surrogate pairs, which no tokenizer takes.
    return check_json(json.loads(text.encode(errors="replace").decode()))


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
