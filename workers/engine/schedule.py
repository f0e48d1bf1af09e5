"""The learning rate of every engine."""

from __future__ import annotations

import math

from workers.engine.base import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Of the optimizer step after ``step`` steps. A pure function: nothing to save but the count.

    Warm-up is linear and its first step is not 0: lr * (step + 1) / warmup_steps. Cosine (Loshchilov & Hutter 2017, eq. 5,
    with num_cycles / 0.5 half waves) goes from lr down to lr * min_lr_ratio at total_steps, and stays there.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * spec.num_cycles * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * wave)
