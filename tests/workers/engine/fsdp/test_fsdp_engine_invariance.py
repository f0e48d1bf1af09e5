"""The gradient of a batch does not depend on how it was cut: micro-batches, ranks, empty slots."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs.schema.common import AggMode
from tests.workers.engine.forks import fork_ranks
from tests.workers.engine.fsdp.cases import MODES, all_cuts, invariance_batch
from tests.workers.engine.fsdp.two_ranks import QUICK, soak
from tests.workers.engine.toy import LocalMeanLoss, ToyLoss, cut, distance, gradients, plain_gradients, plain_model, toy_engine

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6}


class Plain(dict[tuple[AggMode, torch.dtype], dict[str, Tensor]]):
    """Gradients by mode and dtype, computed when they are first asked for."""

    def __init__(self, models: dict[torch.dtype, nn.Module]) -> None:
        self.models = models

    def __missing__(self, key: tuple[AggMode, torch.dtype]) -> dict[str, Tensor]:
        mode, dtype = key
        self[key] = plain_gradients(self.models[dtype], invariance_batch(mode, dtype))
        return self[key]


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> Plain:
    """Gradients by transformers, one row at a time: none of our code but the batch's own."""
    return Plain({dtype: plain_model(models["qwen2"], dtype) for dtype in BOUNDS})


@pytest.mark.parametrize(
    ("dtype", "modes"),
    [
        pytest.param(torch.float64, MODES, id="float64"),
        pytest.param(torch.float32, MODES[:1], id="float32"),
        pytest.param(torch.float32, MODES[1:], id="float32, other modes", marks=pytest.mark.soak),
    ],
)
def test_one_rank(group: None, models: dict[str, str], plain: Plain, dtype: torch.dtype, modes: tuple[AggMode, ...]) -> None:
    engine = toy_engine(models["qwen2"], dtype=str(dtype).removeprefix("torch."))
    apart: dict[str, float] = {}
    for mode in modes:
        first: dict[str, Tensor] = {}
        for name, (shares, plans) in all_cuts(invariance_batch(mode, dtype), 1).items():
            grads = gradients(engine, shares[0], plans[0], ToyLoss())
            first = first or grads
            apart[f"{mode}, {name}, from plain code"] = distance(grads, plain[mode, dtype])
            apart[f"{mode}, {name}, from the first cut"] = distance(grads, first)
    assert {case: value for case, value in apart.items() if not value <= BOUNDS[dtype]} == {}
    assert len(apart) == 2 * 5 * len(modes)


@pytest.mark.parametrize(("mode", "dtype"), [*((mode, torch.float64) for mode in QUICK), (MODES[0], torch.float32)], ids=str)
def test_two_ranks(
    two_ranks: tuple[Path, list[dict[str, dict[str, dict[str, Tensor]]]]],
    plain: Plain,
    mode: AggMode,
    dtype: torch.dtype,
) -> None:
    assert_of_plain_code(two_ranks[1][0]["invariance"], plain, mode, dtype)


@pytest.mark.soak
def test_other_modes_on_two_ranks(models: dict[str, str], plain: Plain, tmp_path: Path) -> None:
    fork_ranks(soak, (str(tmp_path), models), nprocs=2)
    found = torch.load(tmp_path / "soak_0.pt", weights_only=True)
    for mode in MODES[1:]:
        assert_of_plain_code(found, plain, mode, torch.float32)
    for mode in set(MODES) - set(QUICK):
        assert_of_plain_code(found, plain, mode, torch.float64)


def assert_of_plain_code(
    found: dict[str, dict[str, Tensor]],
    plain: Plain,
    mode: AggMode,
    dtype: torch.dtype,
) -> None:
    apart = {
        name: distance(found[f"{dtype} {mode} {name}"], plain[mode, dtype]) for name in all_cuts(invariance_batch(mode, dtype), 2)
    }
    assert {case: value for case, value in apart.items() if not value <= BOUNDS[dtype]} == {}
    assert len(apart) == 5


def test_a_mean_over_the_local_tokens_would_be_seen(group: None, models: dict[str, str]) -> None:
    """With one micro-batch it is the token mean; with several it is not, by far more than the bounds."""
    engine = toy_engine(models["qwen2"], dtype="float64")
    right, summed = (invariance_batch(mode, torch.float64) for mode in ("token-mean", "token-sum"))
    (share,), (whole,) = cut(right, 1, max_tokens=2000)
    truth = gradients(engine, share, whole, ToyLoss())
    (share,), (parts,) = cut(summed, 1, max_tokens=310)
    assert distance(gradients(engine, share, whole, LocalMeanLoss()), truth) <= 1e-10
    assert distance(gradients(engine, share, parts, LocalMeanLoss()), truth) > 0.1
