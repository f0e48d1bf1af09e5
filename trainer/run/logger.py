"""Logger interface: receives a run's metrics and validation responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypedDict


class Sample(TypedDict):
    """One response and its score.

    uid: prompt group. reward_error: reason why the response has no score (score is then 0); None if it has one. conversation: its
    turns, if it is a session of agents (trainer.tracking.conversation).
    """

    uid: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    reward_error: str | None
    conversation: NotRequired[list[dict[str, Any]]]


class Logger(Protocol):
    """A destination of metrics and samples.

    go_back: the run was rolled back to ``step``. Everything logged after it belongs to an abandoned branch; the next step logged
    is ``step + 1``.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...
    def go_back(self, step: int) -> None: ...
    def close(self) -> None: ...
