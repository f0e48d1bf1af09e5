"""Goodput of a run whose nodes fail, by checkpoint interval: discrete events, and the closed forms of the literature.

A run is lost with a node and starts again from its last checkpoint, on a node that takes its place. Times between failures are
exponential; a failure can also hit a restart. Sources: Young, "A first order approximation to the optimum checkpoint interval"
(CACM 17, 1974); Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22, 2006). All times
in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.planner.memory_estimate import memory_roles
from trainer.planner.search import RankedPlan

STAGED, WRITTEN = 2.9e10, 1.04e10
"""Bytes per second of a node until training continues after a checkpoint: with async_save, a copy in host memory; without it, the
files (7B on four H200, 91.4 GB: 3.2 s and 8.8 s with the run directory in memory, docs/evidence.md)."""
LONGEST_ROUND = 1 << 22
"""Steps of a simulated round, which take 8 bytes each in several arrays."""
FAILURES = 2000
"""Simulated failures of an interval: the goodput's standard error is below 1 %."""


@dataclass(frozen=True, slots=True)
class FailureCosts:
    """lost_every: mean seconds between failures of any node. save: seconds that training waits for a checkpoint. restart: seconds
    from a failure to the first step after it."""

    lost_every: float
    save: float
    restart: float

    def daly(self) -> float:
        """Seconds of work between checkpoints that lose the least time."""
        ratio = self.save / (2 * self.lost_every)
        if ratio >= 1:
            return self.lost_every
        young = math.sqrt(2 * self.save * self.lost_every)
        return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save

    def expected_goodput(self, work: float) -> float:
        """Share of time in steps that are kept, with a checkpoint after each ``work`` seconds."""
        mean = self.lost_every
        return work / (mean * math.exp(self.restart / mean) * math.expm1((work + self.save) / mean))

    def goodput(self, steps: Sequence[float], every: int, seed: int = 0) -> float:
        """The same share, simulated with steps of these seconds, in turn, and a checkpoint after each ``every`` of them.

        Intervals that are too long for a round over all steps have steps of their mean.
        """
        if math.lcm(len(steps), every) > LONGEST_ROUND:
            steps = [sum(steps) / len(steps)]
        count = math.lcm(len(steps), every)
        work = np.resize(np.asarray(steps), count).reshape(-1, every).sum(1)
        # When each checkpoint of a round over all steps is complete, from the round's start, and the work that it keeps.
        done, kept = np.cumsum(work + self.save), np.concatenate([[0.0], np.cumsum(work)])
        at, useful, wall = 0, 0.0, 0.0  # at: checkpoints of the round so far
        for life in np.random.default_rng(seed).exponential(self.lost_every, FAILURES).tolist():
            wall += life
            if life > self.restart:
                end = life - self.restart + (done[at - 1] if at else 0.0)
                rounds, rest = divmod(end, done[-1])
                reached = int(np.searchsorted(done, rest, side="right"))
                useful += rounds * kept[-1] + kept[reached] - kept[at]
                at = reached % len(done)
        return float(useful / wall)


def intervals(steps: Sequence[float], costs: FailureCosts) -> list[int]:
    """Numbers of steps between checkpoints to compare: a geometric series up to the time between failures."""
    most = max(1, round(costs.lost_every / (sum(steps) / len(steps))))
    return sorted({*(round(1.3**i) for i in range(60) if 1.3**i < most), most})


def save_seconds(plan: RankedPlan) -> float:
    """Seconds that training waits for a checkpoint; the nodes of the trainers write their shares at the same time."""
    config = plan.config
    size = sum(role.checkpoint() for role in memory_roles(config, plan.place, plan.shapes).values())
    rate = STAGED if config.trainer.checkpoint.async_save else WRITTEN
    return size / plan.place.pool("actor").nnodes / rate
