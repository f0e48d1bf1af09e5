"""AdamW on shards."""

import dataclasses
import math

import pytest
import torch

from tests.workers.engine.toy import ADAMW
from workers.engine.fsdp.optimizer import ShardedAdamW, global_norm
from workers.engine.schedule import learning_rate


def spec(**changes: object) -> object:
    return dataclasses.replace(ADAMW, lr=1.0, **changes)


def test_matrices_decay_and_vectors_do_not() -> None:
    params = {"weight": torch.ones(2, 2), "norm": torch.ones(2)}
    optimizer = ShardedAdamW(params, dataclasses.replace(ADAMW, lr=0.1, weight_decay=0.5))
    optimizer.step({name: torch.zeros_like(param) for name, param in params.items()}, norm=0.0)
    torch.testing.assert_close(params["weight"], torch.full((2, 2), 0.95))
    torch.testing.assert_close(params["norm"], torch.ones(2))


@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_clips_to_the_global_norm(clip: float) -> None:
    """Adam does not see the scale of the first gradient, its moments do."""
    params = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    grads = {"a": torch.full((2, 2), 3.0), "b": torch.full((3,), 4.0)}
    norm = math.sqrt(4 * 9 + 3 * 16)
    optimizer = ShardedAdamW(params, dataclasses.replace(ADAMW, clip_grad=clip))
    optimizer.step({name: grad.clone() for name, grad in grads.items()}, norm)
    for name, grad in grads.items():
        clipped = grad * min(1.0, clip / norm)
        torch.testing.assert_close(optimizer.moments()["exp_avg", name], 0.1 * clipped)


def test_global_norm(group: None) -> None:
    """At least in float32: 300 ** 2 does not fit float16."""
    grads = [torch.full((50,), 300.0, dtype=torch.float16), torch.full((2, 2), 4.0, dtype=torch.float16)]
    assert float(global_norm(grads, torch.device("cpu"), 1)) == pytest.approx(math.sqrt(50 * 300**2 + 4 * 16))


def test_the_count_of_steps_is_the_schedules_state() -> None:
    changes = dataclasses.replace(ADAMW, schedule="cosine", warmup_steps=3, total_steps=9)
    optimizer = ShardedAdamW({"a": torch.zeros(2, 2)}, changes)
    optimizer.set_steps(5)
    assert optimizer.step({"a": torch.ones(2, 2)}, norm=2.0) == learning_rate(changes, 5)
    assert optimizer.steps == 6
