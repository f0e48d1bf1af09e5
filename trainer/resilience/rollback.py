"""How often a run was rolled back to a checkpoint from before its divergence, and the seeds that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from workers.seeding import seed_of


@dataclass(slots=True)
class Rollbacks:
    """How often the run has gone back. Enters the seeds of what training draws; 0 leaves them as they are."""

    count: int = 0

    def purpose(self, purpose: str) -> str:
        """Of draws for training."""
        return f"{purpose}, rollback {self.count}" if self.count else purpose

    def seed(self, seed: int) -> int:
        return seed_of(seed, "rollback", self.count) if self.count else seed

    def metrics(self) -> dict[str, float]:
        """Flags the steps of a run that has gone back."""
        return {"training/rollbacks": float(self.count)} if self.count else {}

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"]
