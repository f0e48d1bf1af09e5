"""How large a micro-batch of an update may be, since memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.run.events import Events
from workers.plan import Limits

SIZES = {"actor": "actor_rollout_ref.actor.ppo_", "critic": "critic.ppo_", "model": "data."}
"""By role: how the keys of its micro-batches' size begin."""


class Budget:
    """Of one role. It outlives restarts, and is in checkpoints: a run does not run out of the same memory twice."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.most: Limits | None = None  # None: what the configuration says
        self.untold = ""

    def limits(self, configured: Limits, lengths: Sequence[int]) -> Limits:
        """What holds for rows of these lengths. A row longer than the budget is a micro-batch of its own."""
        if configured.max_tokens is not None and self.most is not None and self.most.max_tokens is not None:
            return Limits(max_tokens=min(configured.max_tokens, max(self.most.max_tokens, *lengths)))
        if configured.max_rows is not None and self.most is not None and self.most.max_rows is not None:
            return Limits(max_rows=min(configured.max_rows, self.most.max_rows))
        return configured

    def halve(self, configured: Limits, sizes: Sequence[tuple[int, int]], longest: int, said: str) -> None:
        """To half of the largest micro-batch, which did not fit. sizes: rows and tokens of each. longest: tokens of the longest
        row. said: by the allocator.

        Raises ValueError if that is one row: no micro-batch is smaller.
        """
        rows, tokens = (max(column) for column in zip(*sizes, strict=True))
        by_tokens = configured.max_tokens is not None
        if rows == 1 or (by_tokens and tokens <= longest):
            raise ValueError(
                f"{self.role}: memory ran out in the update, and micro-batches are as small as can be: one row, the longest of "
                f"{longest} tokens ({said}); allow shorter rows, set enable_gradient_checkpointing or offloading, or take "
                "more GPUs"
            )
        self.most = Limits(max_tokens=tokens // 2) if by_tokens else Limits(max_rows=rows // 2)
        had, kept = (f"{tokens} tokens", f"{tokens // 2}") if by_tokens else (f"{rows} rows", f"{rows // 2}")
        self.untold = (
            f"{self.role}: memory ran out in the update, at micro-batches of up to {had}; from now on they have {kept} at most "
            f"({said})"
        )

    @property
    def key(self) -> str:
        """The key that says how large micro-batches of an update are. Of a budget that was halved."""
        assert self.most is not None
        return SIZES[self.role] + ("max_token_len_per_gpu" if self.most.max_tokens is not None else "micro_batch_size_per_gpu")

    def tell(self, events: Events, step: int) -> None:
        """Once for each time that memory ran out."""
        if self.untold:
            events.add(step, "out of memory", self.untold)
            self.untold = ""

    def state(self) -> dict[str, Any]:
        return {} if self.most is None else {"max_tokens": self.most.max_tokens, "max_rows": self.most.max_rows}

    def load(self, state: dict[str, Any]) -> None:
        """A budget that was halved since the checkpoint was written stays."""
        if state and self.most is None:
            self.most = Limits(**state)
