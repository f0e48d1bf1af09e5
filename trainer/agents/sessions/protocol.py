"""What the controller and the agent processes send each other: plain data, no user code, no text that is tokenised again.

A session is one trajectory. It asks for turns of the model, one at a time or several, and says when it can do nothing more
without one of them (``Settled``), or that it has finished. That is its answer to all it was given, a task or sampled turns. So
the controller knows at any time whose turn it is, and a tick waits for neither more nor less than it must.

The messages have no slots: a frozen class with slots is pickled by Python code, one without by C.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # it imports torch, which agent processes do without
    from workers.rollout.base import FinishReason


@dataclass(frozen=True)
class Task:
    """What a session works on: a row of the data set.

    id: of the session. prompt: its messages. agent: name of the loop; None: the configured one. max_prompt: longest first prompt,
    in tokens. max_tokens: of everything after it, sampled and observed. max_length: of the engine, of a prompt and its turn.
    """

    id: int
    prompt: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    agent: str | None
    max_prompt: int
    max_tokens: int
    max_length: int = sys.maxsize


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model, L tokens: token_ids int64 (L,), log_probs float32 (L,), versions int32 (L,).

    key, ordinal: of the call, see trainer.agents.tree.Call.
    """

    key: int
    ordinal: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True)
class Wanted:
    """The session needs a turn of the model after ``prompt_ids`` (int64), of at most ``max_tokens`` tokens.

    key, ordinal: identity of the call, part of its seed. outcomes: of user code since its last message, JSON. restarted: the
    session could not be repeated, and has begun anew: its journal and the calls before this one are void.
    """

    id: int
    key: int
    ordinal: int
    prompt_ids: np.ndarray
    max_tokens: int
    outcomes: list[Any] = field(default_factory=list)
    restarted: bool = False


@dataclass(frozen=True)
class Settled:
    """The session waits for turns of the model, and does nothing more before it gets one."""


@dataclass(frozen=True)
class Part:
    """A row for training, T tokens: columns as in trainer.agents.tree.Row. prompt_length: tokens of its first prompt."""

    input_ids: np.ndarray
    response_mask: np.ndarray
    rollout_log_probs: np.ndarray
    weight_version: np.ndarray
    prompt_length: int


class TurnPlace(NamedTuple):
    """Where a turn of the model is: tokens [start, end) of a part; those before it are the prompt of its call.

    key, ordinal, max_tokens: of the call, see ``Wanted``.
    """

    part: int
    start: int
    end: int
    key: int
    ordinal: int
    max_tokens: int


@dataclass(frozen=True)
class Finished:
    """The session has ended. parts: its rows, at least one, in order.

    finished: whether the last turn ended by itself (not truncated, and not ended by a limit). reward: of an environment or an
    agent loop that scores its sessions; None: the reward function scores it. extra: what the reward function gets in
    extra_info besides the data set's (num_turns, tool_rewards, turn_scores ...), JSON; error: why the session ended early.
    metrics: numbers of this session. messages: the whole conversation, JSON, for people; see AgentSession.marked. outcomes,
    restarted: as in ``Wanted``. turns: of the model, in order.
    """

    id: int
    parts: list[Part]
    finished: bool
    reward: float | None
    extra: dict[str, Any]
    metrics: dict[str, float]
    messages: list[dict[str, Any]]
    outcomes: list[Any] = field(default_factory=list)
    turns: list[TurnPlace] = field(default_factory=list)
    restarted: bool = False


@dataclass(slots=True)
class Journal:
    """A session so far. A process that is given it repeats the session up to here without user code and without the model.

    The last turns may lack their answer: a session that was given turns and has not answered yet. waits: key and ordinal of the
    calls that have no turn yet.
    """

    task: Task
    turns: list[SampledTurn] = field(default_factory=list)
    outcomes: list[Any] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)

    def copy(self) -> Journal:
        """A journal that can grow by itself."""
        return Journal(self.task, [*self.turns], [*self.outcomes], [*self.waits])
