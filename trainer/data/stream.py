"""Stream of a run's prompts in rounds."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.dataset import Prompt, PromptDataset
from trainer.data.order import DataOrder


@dataclass(slots=True)
class PromptStream:
    """Rounds of ``order.batch_size`` prompts in data order. Its only state is ``drawn``, the number of rounds so far.

    A step takes one round, or with algorithm.filter_groups as many as it needs to fill its batch. No prompt repeats within an
    epoch.
    """

    data: PromptDataset
    order: DataOrder
    drawn: int = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next round, from 0."""
        return self.drawn // self.rounds_per_epoch

    @property
    def rounds_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def draw(self) -> list[Prompt]:
        """Prompts of the next round."""
        rows = self.order.batch(self.drawn)
        self.drawn += 1
        return [self.data[row] for row in rows]

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]
