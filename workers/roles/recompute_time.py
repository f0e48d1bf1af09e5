"""Seconds in which a rollout engine computes unfinished responses again, after new weights."""

from __future__ import annotations


class RecomputeTime:
    """Time of recomputation, estimated from the times of decode steps.

    Engines compute prompts, and what unfinished responses have so far, within decode steps. The time of all this is that by which
    such steps take longer than the mean of the others; the share of recomputation is its share of the computed tokens.
    """

    def __init__(self) -> None:
        self._before = 0
        self._reset()

    def _reset(self) -> None:
        self.again = 0
        """Tokens of prompts and unfinished responses that were submitted again, since the last ``take``."""
        self._prefilled, self._steps, self._seconds = 0, [0, 0], [0.0, 0.0]  # of steps without and with such tokens

    def add(self, seconds: float, prefilled: int) -> None:
        """Add a step. prefilled: tokens of prompts and earlier responses that it began to compute.

        The next step counts as one of them too: with vLLM's asynchronous scheduling it waits for their results.
        """
        longer = prefilled > 0 or self._before > 0
        self._steps[longer] += 1
        self._seconds[longer] += seconds
        self._prefilled, self._before = self._prefilled + prefilled, prefilled

    def take(self) -> float:
        """Seconds of recomputation since the last call. 0 if every step computed such tokens, so that there is no comparison."""
        (others, longer), (usual, spent), prefilled, again = self._steps, self._seconds, self._prefilled, self.again
        self._reset()
        if not others or not prefilled:
            return 0.0
        return max(0.0, spent - longer * usual / others) * min(1.0, again / prefilled)
