"""torch.compile for functions of packed tokens, and the seconds that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CompileTime:
    """Seconds that this process spends in torch.compile, from the first call of ``compiled`` on, also for others' functions.

    torch calls back for the outermost compilation only.
    """

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def count(self) -> None:
        """Begin to count; again after ``torch.compiler.reset``, which forgets whom to call back."""
        # Not at the top of the module: it loads torch's compiler, which takes a second.
        from torch._dynamo.callback import callback_handler

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _begin(self, _: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._start


COMPILE_TIME = CompileTime()


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compile for tensors of any length; if determinism is requested, to code that is not chosen by timing alternatives."""
    COMPILE_TIME.count()
    options: dict[str, Any] | None = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
    return torch.compile(function, dynamic=True, options=options)
