"""Memory runs out in an update, and the step can be had again: a real allocator's error, wherever it strikes."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.workers.engine.strike import TOO_MUCH, strike
from tests.workers.engine.toy import ToyLoss, ValueLoss, cut, distance, gradients, toy_batch, toy_engine
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.out_of_memory import OutOfMemory, RepeatableOutOfMemory, is_out_of_memory

LENGTHS = [9, 30, 1, 14, 22, 7]


def first_mlp(engine: FSDPEngine) -> nn.Module:
    return engine._model.hf.base_model.layers[0].mlp


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_nothing_is_left_of_a_step_that_ran_out_of_memory(
    group: None, models: dict[str, str], head: str, dtype: str, where: str
) -> None:
    """Whichever micro-batch it was, the same step gives the same gradient; in bfloat16 FSDP stands between."""
    (share,), (plan,) = cut(toy_batch(LENGTHS), max_tokens=40)
    loss = ToyLoss() if head == "lm" else ValueLoss()
    engine = toy_engine(models["qwen2"], head, dtype=dtype, model_dtype="float32")
    assert isinstance(engine._model, FSDPModule) == (dtype == "bfloat16") and len(plan) == 3
    expected = gradients(engine, share, plan, loss)
    before = {name: param.detach().clone() for name, param in engine._params.items()}
    for call in (1, 2, 3):
        handle = strike(first_mlp(engine), call, where)
        with pytest.raises(RepeatableOutOfMemory, match="can't allocate memory"):
            engine.train_step(share, plan, loss)
        handle.remove()
        assert all(param.grad is None for param in engine._params.values())
        assert all(torch.equal(param.detach(), before[name]) for name, param in engine._params.items())
        assert distance(gradients(engine, share, plan, loss), expected) == 0.0


def test_memory_is_given_back_before_the_step_is_tried_again(group: None, models: dict[str, str]) -> None:
    """The error does not hold the graph: what the micro-batch had is free while the error is looked at."""
    engine = toy_engine(models["qwen2"])
    (share,), (plan,) = cut(toy_batch(LENGTHS), max_tokens=400)
    seen: list[Any] = []

    class Watched(ToyLoss):
        def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> Any:
            seen.append(weakref.ref(outputs["log_probs"]))
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    with pytest.raises(RepeatableOutOfMemory) as reported:
        engine.train_step(share, plan, Watched())
    assert seen[0]() is None and reported.value is not None


def test_the_gradient_is_the_same_in_halves(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"]), toy_batch(LENGTHS)
    whole, halves = (gradients(engine, *(part[0] for part in cut(batch, max_tokens=limit)), ToyLoss()) for limit in (83, 41))
    assert 0.0 < distance(halves, whole) <= 1e-6


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as reported:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert (
        is_out_of_memory(reported.value) and is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    )
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(OutOfMemory("reported already"))


def test_another_error_of_a_step_is_itself(group: None, models: dict[str, str]) -> None:
    class Wrong(ToyLoss):
        def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> Any:
            raise RuntimeError("shapes do not match")

    (share,), (plan,) = cut(toy_batch(LENGTHS), max_tokens=40)
    with pytest.raises(RuntimeError, match="shapes do not match") as reported:
        toy_engine(models["qwen2"]).train_step(share, plan, Wrong())
    assert type(reported.value) is RuntimeError
