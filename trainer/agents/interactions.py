"""Interactions: a simulated user who answers the model after each of its turns. The interface is verl's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.agents.isolation import SessionLoop, UserCodeError, to_the_end
from trainer.agents.tools import accepted
from trainer.data.encoding import Message
from trainer.rewards.scoring import finite


class BaseInteraction:
    """Base class of interactions. One object serves all sessions, each of which has a thread of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        """config: of the YAML file, with the interaction's name."""
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a session; returns its id. kwargs: ``interaction_kwargs`` of the data set's row."""
        assert instance_id is not None, "every session names its instance"
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation ends, the user's text, score of the turn, other values)."""
        raise TypeError(f"{type(self).__name__} has no method generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score of the conversation. As in verl's loop nothing calls it: the score of a turn is that of generate_response."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End the session."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """Reply of a simulated user. done: the conversation ends. score: of the model's turn; None if there is none.

    error: what went wrong, one line; the conversation then ends.
    """

    done: bool
    text: str
    score: float | None
    error: str | None = None


class InteractionSession:
    """A session of an interaction: calls its methods with a time limit, and always finalizes it. A context manager."""

    def __init__(self, interaction: Any, loop: SessionLoop, *, session: str, kwargs: Mapping[str, Any], seconds: float) -> None:
        """interaction: object with the methods of BaseInteraction. kwargs: ``interaction_kwargs`` of the row."""
        self.interaction = interaction
        self.error: str | None = None
        """Why there is no session any more, one line."""
        self._loop, self._id, self._kwargs, self._seconds = loop, session, dict(kwargs), seconds

    async def reply(self, messages: Sequence[Message]) -> UserReply:
        """The user's reply to a conversation that ends with the model's turn."""
        if self.error is None:
            try:
                result = await self._call(self.interaction.generate_response, deepcopy([*messages]))
                done, text, score, _ = result
                number = None if score is None else finite(score)
                if score is not None and number is None:
                    raise ValueError(f"the score is {score!r}, not a finite number")
                # A half surrogate pair, as of JSON that is cut off, is no text for a tokenizer.
                return UserReply(bool(done), str(text).encode(errors="replace").decode(), number)
            except (UserCodeError, TypeError, ValueError) as error:
                self.error = f"interaction {self.interaction.name}: {error}"
        return UserReply(True, "", None, self.error)

    async def repeat(self, messages: Sequence[Message]) -> None:
        """Bring the interaction to the state after a reply that is known."""
        if self.error is None:
            with suppress(UserCodeError):  # as with the reply itself, which is known
                await self._call(self.interaction.generate_response, deepcopy([*messages]))

    async def __aenter__(self) -> InteractionSession:
        try:
            self._id = await self._call(self.interaction.start_interaction) or self._id
        except UserCodeError as error:
            self.error = f"interaction {self.interaction.name}: {error}"
        except BaseException:  # cancelled: without __aexit__
            await to_the_end(self._finalize())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await to_the_end(self._finalize())

    async def _finalize(self) -> None:
        try:
            await self._call(self.interaction.finalize_interaction)
        except UserCodeError as error:
            self.error = self.error or f"interaction {self.interaction.name}: {error}"

    async def _call(self, method: Any, *args: Any) -> Any:
        call = partial(method, self._id, *args, **accepted(method, self._kwargs))
        return await self._loop.run(call, seconds=self._seconds)
