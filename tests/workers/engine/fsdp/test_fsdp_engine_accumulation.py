"""Gradients of several micro-batches: reduced over ranks in each, or in the last alone."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.algorithms.losses.test_actor_loss import actor_loss
from tests.workers.engine.fsdp.two_ranks import LARGER, REDUCED
from tests.workers.engine.toy import cut, distance, toy_batch, toy_engine
from trainer.planner.memory_model import Setting, Shape, reserved, training
from workers import metric
from workers.engine.fsdp import units

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}
"""Operations that would wait for a GPU. They may read columns of a batch, which is on the host."""
TwoRanks = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize(("kept", "bound"), [("float64", 1e-10), ("float32", 1e-6), ("bfloat16", 2**-8)])
def test_the_gradient_is_that_of_one_micro_batch(two_ranks: TwoRanks, kept: str, bound: float, reduced: str) -> None:
    """bfloat16: the parameters' dtype. Each micro-batch's gradient and their sum are rounded to it once, half a unit in 2^8."""
    found = two_ranks[1][0]["accumulation"]
    assert distance(found[f"{kept} {reduced}"], found[f"{kept} one"]) <= bound


def test_sums_in_bfloat16_would_be_seen(two_ranks: TwoRanks) -> None:
    """Eight additions in bfloat16 are further from the sum than the sums of the engine are."""
    found = two_ranks[1][0]["accumulation"]
    exact: dict[str, Tensor] = found["float32 one"]
    assert distance(found["bfloat16 each"], exact) <= 1.2 * distance(found["bfloat16 one"], exact)


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_on_every_rank(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the memory model knows both: 4 bytes a parameter, or that over the ranks."""
    monkeypatch.setattr(units, "UNIT_PARAMETERS", 1)
    shape, found = Shape.of(LARGER), two_ranks[1][0]["memory"]
    settings = {name: Setting(gpus=2, several=True, no_sync=name == "last") for name in REDUCED}
    predicted = {name: sum(training(shape, setting, 256).values()) for name, setting in settings.items()}
    assert found == pytest.approx(predicted, rel=0.06)
    assert found["last"] - found["each"] == pytest.approx(predicted["last"] - predicted["each"], rel=0.2)


def test_one_gpu_holds_no_second_copy_of_the_gradients() -> None:
    """Reduced in every micro-batch, the sums are the gradients; waiting, they are unsharded sums that are reduced at the end."""
    shape = Shape.of(LARGER)
    each, last = (Setting(gpus=1, several=True, no_sync=no_sync) for no_sync in (False, True))
    cached = [reserved(shape, setting, 256) - sum(training(shape, setting, 256).values()) for setting in (each, last)]
    assert cached[1] - cached[0] == pytest.approx(4 * shape.parameters, rel=0.05)


class Reads(TorchDispatchMode):
    """Counts operations that read a tensor, by the project's innermost file and line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, indices = op._schema.name, args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        by_mask = "index" in name and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)
        if name in WAITS or by_mask:
            called = [frame for frame in traceback.extract_stack() if {"workers", "trainer"} & {*Path(frame.filename).parts}]
            where = next(frame for frame in reversed(called) if "tests" not in Path(frame.filename).parts)
            if Path(where.filename).name not in {"batch.py", "micro_batch.py"}:
                self.found[f"{Path(where.filename).name}: {where.line}"] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_policy", [False, True])
def test_micro_batches_wait_for_the_device_once_in_all(
    group: None, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, on_policy: bool
) -> None:
    """As on a GPU, where each number that is read waits for all work before it."""
    monkeypatch.setattr(metric, "_stays", lambda value: True)
    engine, loss = toy_engine(models["qwen2"]), actor_loss(own=on_policy, use_kl_loss=True)
    batch = toy_batch([4, 30, 1, 17, 30, 2])
    columns = {
        name: torch.linspace(-2, -1, batch.total_tokens) for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    (share,), (plan,) = cut(batch.with_tokens(**columns, advantages=torch.linspace(-1, 1, batch.total_tokens)), 1, max_tokens=50)
    assert len(plan) > 1 and loss.needs == {"log_probs", "sampled_entropy"}
    with Reads() as reads:
        found = engine.accumulate(share, plan, loss)
    # Scalars all at once, and the values of each part of a sample.
    samples = sum(isinstance(one, metric.Sample) for one in found.values())
    assert all(line.startswith("metric.py") for line in reads.found), reads.found
    assert sum(reads.found.values()) <= 1 + samples * len(plan)
    with Reads() as reads:
        engine.forward(share, plan, {"log_probs"})
    assert not reads.found
    monkeypatch.undo()
    engine.move(grads="cpu")
    for name, one in engine.accumulate(share, plan, loss).items():
        if isinstance(one, metric.Sample):
            assert np.array_equal(one.values, found[name].values)
        else:
            assert one == found[name]
