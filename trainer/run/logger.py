"""The interface of a logger: what receives a run's metrics and validation responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict


class Sample(TypedDict):
    """One answer and its score; reward_error: why it has none (the score is then 0), None if it has one."""

    uid: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    reward_error: str | None


class Logger(Protocol):
    """go_back: what was logged past ``step`` is of a branch that is left; the next step is the one after it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...
    def go_back(self, step: int) -> None: ...
    def close(self) -> None: ...
