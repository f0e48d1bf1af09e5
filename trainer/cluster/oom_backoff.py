"""Micro-batch back-off: smaller micro-batches in updates after memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.run.events import Events
from workers.plan import Limits

SIZES = {"actor": "actor_rollout_ref.actor.ppo_", "critic": "critic.ppo_", "model": "data."}
"""By role, the prefix of the keys for the size of its micro-batches."""


class Budget:
    """Micro-batch limit of one role since memory ran out.

    It survives restarts and is saved in checkpoints, so that a run does not run out of the same memory twice.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.most: Limits | None = None  # None: as configured
        self.unreported = ""

    def limits(self, configured: Limits, lengths: Sequence[int]) -> Limits:
        """Limits for rows of these lengths (tokens). A row longer than the budget is a micro-batch of its own."""
        if configured.max_tokens is not None and self.most is not None and self.most.max_tokens is not None:
            # A row is never split, so the longest one must fit, whatever the budget.
            return Limits(max_tokens=min(configured.max_tokens, max(self.most.max_tokens, *lengths)))
        if configured.max_rows is not None and self.most is not None and self.most.max_rows is not None:
            return Limits(max_rows=min(configured.max_rows, self.most.max_rows))
        return configured

    def halve(self, configured: Limits, sizes: Sequence[tuple[int, int]], longest: int, message: str) -> None:
        """Reduce the budget to half of the largest micro-batch, which did not fit.

        sizes: (rows, tokens) of each micro-batch. longest: tokens of the longest row. message: message of the allocator. Raises
        ValueError if that micro-batch is a single row: it cannot be split.
        """
        rows, tokens = (max(column) for column in zip(*sizes, strict=True))
        by_tokens = configured.max_tokens is not None
        if rows == 1 or (by_tokens and tokens <= longest):
            raise ValueError(
                f"{self.role}: memory ran out in the update, and micro-batches are as small as can be: one row, the longest of "
                f"{longest} tokens ({message}); allow shorter rows, set enable_gradient_checkpointing or offloading, or take "
                "more GPUs"
            )
        # Half of what was used, not of the configured limit: micro-batches may be far below it, and the repetition would change
        # nothing.
        self.most = Limits(max_tokens=tokens // 2) if by_tokens else Limits(max_rows=rows // 2)
        had, kept = (f"{tokens} tokens", f"{tokens // 2}") if by_tokens else (f"{rows} rows", f"{rows // 2}")
        self.unreported = (
            f"{self.role}: memory ran out in the update, at micro-batches of up to {had}; from now on they have {kept} at most "
            f"({message})"
        )

    @property
    def key(self) -> str:
        """Configuration key for the size of micro-batches in updates. Only for a budget that was halved."""
        assert self.most is not None
        return SIZES[self.role] + ("max_token_len_per_gpu" if self.most.max_tokens is not None else "micro_batch_size_per_gpu")

    def tell(self, events: Events, step: int) -> None:
        """Record an event, once for each time that memory ran out."""
        if self.unreported:
            events.add(step, "out of memory", self.unreported)
            self.unreported = ""

    def state(self) -> dict[str, Any]:
        return {} if self.most is None else {"max_tokens": self.most.max_tokens, "max_rows": self.most.max_rows}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the budget of a checkpoint, unless it was halved after the checkpoint was written."""
        if state and self.most is None:
            self.most = Limits(**state)
