"""Balance of the rollout pool and the trainer's, with generation ahead: which of them waits, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

ROLLOUT, TRAINER = "perf/rollout_idle", "perf/trainer_idle"
BALANCED = 0.1
"""Share of a step that a pool may wait without advice: times vary by about as much from step to step."""


def balance_line(steps: Sequence[Mapping[str, float]]) -> str | None:
    """How long each pool waits for the other, as a share of a step, and advice; None without generation ahead.

    steps: entries of metrics.jsonl. The median counts: the first step waits for its own generation.
    """
    timed = [entry for entry in steps if ROLLOUT in entry and TRAINER in entry]
    if not timed:
        return None
    rollout, trainer = (median(entry[name] for entry in timed) for name in (ROLLOUT, TRAINER))
    if max(rollout, trainer) <= BALANCED:
        return f"the pools are balanced: the engines wait {rollout:.0%} of a step, the trainer {trainer:.0%}"
    if rollout > trainer:
        advice = "move GPUs from the rollout pool to the trainer's (placement.pools)"
        return f"the engines wait {rollout:.0%} of a step for the trainer, which waits {trainer:.0%}: {advice}"
    advice = (
        "move GPUs from the trainer's pool to the rollout pool (placement.pools), or raise async_training.oversubmit "
        "(async_training.mode=async, max_staleness above 1)"
    )
    return f"the trainer waits {trainer:.0%} of a step for the engines, which wait {rollout:.0%}: {advice}"
