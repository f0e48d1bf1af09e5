"""The gradient of a batch is the same however the model and the batch are cut, and by whichever engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.fsdp.cases import all_cuts, invariance_batch
from tests.workers.engine.megatron.rank import INVARIANT, sequence_loss
from tests.workers.engine.toy import ToyLoss, cut, distance, gradients, one_rank, plain_gradients, plain_model, toy_engine

CASES = [pytest.param(size, name, id=name) for size, cases in INVARIANT.items() for name in cases]


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> dict[str, Tensor]:
    """By transformers, one row at a time."""
    return plain_gradients(plain_model(models["qwen2"]), invariance_batch("token-mean", torch.float32))


def joined(parts: list[dict[str, tuple[Tensor, list[int]]]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of the ranks' parts, each element given by one of them, or alike by several."""
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    for rank in parts:
        for name, (part, begin) in rank.items():
            place = tuple(slice(start, start + size) for start, size in zip(begin, part.shape, strict=True))
            assert whole[name][place].isnan().all() or torch.equal(whole[name][place], part)
            whole[name][place] = part
    return whole


@pytest.mark.parametrize(("size", "name"), CASES)
def test_megatron(ranks_of: Callable[[int], list[dict[str, Any]]], plain: dict[str, Tensor], size: int, name: str) -> None:
    found = [rank[f"invariance {name}"] for rank in ranks_of(size)]
    n_shares = 2 if name == "dp2" else 1
    cuts = all_cuts(invariance_batch("token-mean", torch.float32), n_shares)
    apart = {by: distance(joined([rank[by] for rank in found], plain), plain) for by in cuts}
    assert {by: value for by, value in apart.items() if not value <= 1e-5} == {}
    assert len(apart) == 5


@pytest.fixture(scope="module")
def whole(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """GSPO by FSDP, each trajectory as one row, all in one micro-batch."""
    batch = invariance_batch("token-mean", torch.float32)
    with one_rank(tmp_path_factory.mktemp("whole")):
        return gradients(toy_engine(models["qwen2"]), batch, (tuple(range(len(batch))),), sequence_loss())


@pytest.mark.parametrize(("size", "name"), CASES)
def test_trajectories_as_several_rows(
    ranks_of: Callable[[int], list[dict[str, Any]]], whole: dict[str, Tensor], size: int, name: str
) -> None:
    found = joined([rank[f"invariance {name}"]["parts"] for rank in ranks_of(size)], whole)
    assert distance(found, whole) <= 1e-5 and max(float(grad.abs().max()) for grad in whole.values()) > 1e-3


def test_fsdp_on_the_same_batch(group: None, models: dict[str, str], plain: dict[str, Tensor]) -> None:
    """Two ranks of FSDP, and every other way to weigh tokens: fsdp/test_engine_invariance.py."""
    (share,), (plan,) = cut(invariance_batch("token-mean", torch.float32), max_tokens=310)
    assert distance(gradients(toy_engine(models["qwen2"]), share, plan, ToyLoss()), plain) <= 1e-5
