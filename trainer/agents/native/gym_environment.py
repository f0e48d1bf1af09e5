"""Text environments with Gymnasium's interface; Gymnasium itself is not needed."""

from __future__ import annotations

import json
from typing import Any, Protocol, runtime_checkable

from trainer.agents.environments import Environment, EnvironmentStep
from trainer.agents.messages import Message


class GymGame(Protocol):
    """Interface of Gymnasium's environments, with texts as observations and actions."""

    def reset(self) -> tuple[str, dict[str, Any]]: ...

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]: ...


@runtime_checkable
class _Closing(Protocol):
    def close(self) -> Any: ...


class GymEnvironment(Environment):
    """Base class: write ``make``. The system message of the task, then an observation per turn, as messages of the user."""

    def __init__(self) -> None:
        self._game: GymGame | None = None

    def make(self, task: Any) -> GymGame:
        """The environment of a session. task: see Environment.reset; randomness should be seeded by it."""
        raise TypeError(f"{type(self).__name__} has no method make")

    def action(self, message: Message) -> str:
        """The action in a turn of the model."""
        return str(message["content"])

    def reset(self, task: Any) -> list[Message]:
        self._game = self.make(task)
        observation, _ = self._game.reset()
        system = [message for message in task.prompt if message["role"] == "system"]
        return [*system, {"role": "user", "content": _text(observation)}]

    def step(self, message: Message) -> EnvironmentStep:
        assert self._game is not None, "reset makes it"
        observation, reward, terminated, truncated, info = self._game.step(self.action(message))
        # Such environments return arrays and objects in info.
        plain = json.loads(json.dumps({str(name): value for name, value in info.items()}, default=str))
        return EnvironmentStep(_text(observation), reward, bool(terminated or truncated), plain | {"truncated": bool(truncated)})

    def close(self) -> None:
        if isinstance(self._game, _Closing):
            self._game.close()


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"the observation is {type(observation).__name__}; only text is supported")
    return observation
