"""Warnings about learning rates that are too small for a run to learn, from arithmetic with its configuration.

Adam moves a weight by about the learning rate at most in one update (Kingma & Ba 2015, arXiv:1412.6980, section 2.1). Weights
have a standard deviation of ``initializer_range`` when they are drawn, 0.02 in most models of transformers. Two cases follow:

- bfloat16 has 8 significant bits: its numbers near w are at least 2^-8 |w| apart, and w + step is rounded to w if
  |step| < 2^-9 |w|. The FSDP engine keeps trained weights and optimizer state in ``model_dtype`` alone, so that with bfloat16
  every weight beyond 2^9 lr stays as it is, however many updates there are. LoRA adapters and Megatron's optimizer have float32
  copies.
- A run moves a weight by lr * updates at most. If that is less than a tenth of ``initializer_range``, a tiny model, whose layers
  sum over few weights, hardly changes. Pretrained models of usual width do learn from smaller movements, so that only models with
  a hidden size below that of the smallest ones, on the CPU, get this warning. Measured on the quick start: 200 updates with lr
  1e-6, 4e-6, 8e-6 and 3e-4, of which all but the last are below that bound, took the held-out accuracy from 0.53 to 0.55, 0.60,
  0.61 and 0.90 (512 problems, standard error 0.02).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from configs.schema.common import ModelConfig, OptimConfig, ShardedConfig, WorkersConfig

INITIALIZER_RANGE = 0.02
LEAST_MOVEMENT = 0.1
"""Movement of a weight over a run, relative to initializer_range, below which a tiny model hardly changes."""
TINY = 512
"""Hidden size below which a model is tiny; Pythia-70M has 512, SmolLM2-135M 576."""
FEWEST_UPDATES = 200
"""Updates that a shorter run is taken to have: a trial of a few steps says nothing about its learning rate."""


def rounding_notes(key: str, model: ModelConfig, role: ShardedConfig, optim: OptimConfig) -> Iterator[str]:
    """A warning if most updates of a role are lost to rounding. key: of the role."""
    largest = optim.lr * 2**9
    if role.strategy != "fsdp" or role.fsdp_config.model_dtype != "bfloat16" or model.has_adapter or optim.lr == 0:
        return
    if largest < INITIALIZER_RANGE:
        yield (
            f"{key}.fsdp_config.model_dtype=bfloat16: has 8 significant bits, so updates of lr={optim.lr:g} are rounded away in "
            f"all weights beyond {largest:.2g}, and weights are of size {INITIALIZER_RANGE:g}; set "
            f"{key}.fsdp_config.model_dtype=float32, the default"
        )


def movement_notes(
    key: str, model: ModelConfig, optim: OptimConfig, trainer: WorkersConfig, updates: Callable[[], int | None], advice: float
) -> Iterator[str]:
    """A warning if a tiny model hardly moves in a run. key: of the learning rate. advice: a learning rate that works.

    updates: see updates_of_run; called only if it matters.
    """
    size = _size(model.path) if trainer.device == "cpu" and not model.has_adapter and optim.lr > 0 else None
    if size is None or size[0] >= TINY:
        return
    hidden_size, initializer_range = size
    least = LEAST_MOVEMENT * initializer_range
    if optim.lr * FEWEST_UPDATES < least and (count := updates()) is not None and optim.lr * count < least:
        yield (
            f"{key}={optim.lr:g}: {count} updates move a weight by {optim.lr * count:.2g} at most, and the weights of this "
            f"model (hidden_size {hidden_size}) are of size {initializer_range:g}: it will learn little; set for example "
            f"{key}={advice:g}"
        )


def updates_of_run(
    files: Sequence[str], batch_size: int, total_training_steps: int | None, total_epochs: int, updates_per_step: int = 1
) -> int | None:
    """Optimizer steps of a run; None if the rows of ``files`` are needed and unknown."""
    if total_training_steps is not None:
        return total_training_steps * updates_per_step
    from trainer.data.files import check_file  # imported late: pyarrow is slow to import

    try:
        rows = [check_file(file, [], "") for file in files]
    except ValueError:  # reported by the checks of inputs
        return None
    counted = [count for count in rows if count is not None]
    return sum(counted) // batch_size * total_epochs * updates_per_step if len(counted) == len(rows) else None


def _size(path: str) -> tuple[int, float] | None:
    """(hidden size, initializer range) of a model directory; None if it is no such directory or its file has no hidden size."""
    file = Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_bytes()) if path else {}
    except (OSError, ValueError):  # a hub name, or a file that the checks of inputs report
        return None
    hidden_size, initializer_range = config.get("hidden_size"), config.get("initializer_range", INITIALIZER_RANGE)
    return (hidden_size, initializer_range) if isinstance(hidden_size, int) and initializer_range > 0 else None
