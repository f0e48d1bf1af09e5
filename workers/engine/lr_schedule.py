"""Learning-rate schedules, shared by all engines."""

from __future__ import annotations

import math

from workers.engine.base import OptimizerSpec

STABLE = 0.9
"""Fraction of the steps after the warm-up during which wsd holds the learning rate."""


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of the optimizer step that follows ``step`` steps. A pure function: only the step count is saved.

    Warm-up is linear and its first step is not 0: lr * (step + 1) / warmup_steps.
    cosine (Loshchilov & Hutter 2017, eq. 5, with num_cycles / 0.5 half waves): from lr down to lr * min_lr_ratio at total_steps,
    constant from there on.
    linear: the same range on a straight line.
    wsd: warm-up, stable, decay (Hu et al. 2024): lr is held, then decays by a cosine at the end.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    start = spec.warmup_steps
    if spec.schedule == "wsd":
        start += int(STABLE * max(0, spec.total_steps - start))
    # Clamped: a run may take more steps than its schedule has.
    progress = min(1.0, max(0.0, (step - start) / max(1, spec.total_steps - start)))
    wave = 1.0 - progress if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(2.0 * math.pi * spec.num_cycles * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * wave)
