"""AdamW on shards."""

import dataclasses
import math

import pytest
import torch

from tests.workers.engine.toy import ADAMW
from workers.engine.fsdp.sharded_adamw import ShardedAdamW, global_norm
from workers.engine.lr_schedule import learning_rate


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_moving_average_follows_the_parameters(dtype: torch.dtype) -> None:
    """From where they begin, at least in float32: bfloat16 would lose steps of a hundredth."""
    param = torch.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3)
    optimizer = ShardedAdamW({"weight": param}, dataclasses.replace(ADAMW, lr=0.1, ema_decay=0.99))
    average = optimizer.moments()["ema", "weight"]
    expected = param.double().clone()
    for step in range(5):
        optimizer.step({"weight": torch.full_like(param, 1.0 + step)}, norm=1.0)
        expected = 0.99 * expected + 0.01 * param.double()
        torch.testing.assert_close(average.double(), expected, atol=1e-7, rtol=1e-6)
    assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert average.data_ptr() == optimizer.moments()["ema", "weight"].data_ptr() != param.data_ptr()
    without = ShardedAdamW({"weight": param}, ADAMW)
    assert set(without.moments()) == {("exp_avg", "weight"), ("exp_avg_sq", "weight")}
