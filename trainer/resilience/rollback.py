"""Number of rollbacks of a run to a checkpoint before its divergence, and the seeds derived from it.

After a rollback the same step numbers are run again. With the same prompts and seeds the run would repeat what made it diverge.
So the data stream continues and is not rewound, and the number of rollbacks enters the seeds of all random choices in training.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.seeding import seed_of


@dataclass(slots=True)
class Rollbacks:
    """Counter of rollbacks that derives new seeds for training; at 0 all seeds are unchanged."""

    count: int = 0

    def purpose(self, purpose: str) -> str:
        """Name of a random stream for training (see workers.seeding), different after each rollback."""
        return f"{purpose}, rollback {self.count}" if self.count else purpose

    def seed(self, seed: int) -> int:
        return seed_of(seed, "rollback", self.count) if self.count else seed

    def metrics(self) -> dict[str, float]:
        """training/rollbacks, for the steps after a rollback; empty before the first one."""
        return {"training/rollbacks": float(self.count)} if self.count else {}

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"]
