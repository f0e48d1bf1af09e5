"""Gradients of several micro-batches: reduced over ranks in each, or in the last alone."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.workers.engine.fsdp.two_ranks import LARGER, REDUCED
from tests.workers.engine.toy import distance
from trainer.planner.memory_model import Setting, Shape, reserved, training
from workers.engine.fsdp import units

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
