"""Saved by one cut, gone on with by another, or by FSDP: as if nothing had happened."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine.fsdp.cases import exported, train
from tests.workers.engine.fsdp.test_fsdp_engine_checkpoint import assert_same_bits
from tests.workers.engine.megatron.cases import SAMPLING
from tests.workers.engine.megatron.rank import RESHARDED
from tests.workers.engine.toy import distance, plain_model, toy_engine
from trainer.checkpoint.export import WEIGHTS, check, export, read_weights

RanksOf = Callable[[int], list[dict[str, Any]]]
NAMES = [name for name, _ in RESHARDED]


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bitwise_identical(ranks_of: RanksOf, name: str) -> None:
    """What a thread wrote while training continued is what was saved; loading it over later state leads to the same bits."""
    for rank in ranks_of(2):
        found = rank["resharding"][name]
        assert_same_bits(*found["metrics"])
        assert_same_bits(*found["weights"])


@pytest.mark.parametrize(("before", "after"), pairwise(NAMES))
def test_from_one_cut_to_the_next(ranks_of: RanksOf, before: str, after: str) -> None:
    first, second = (rank["resharding"] for rank in ranks_of(2))
    for rank in (first, second):
        assert_same_bits(rank[after]["loaded"], first[before]["saved"])


def test_as_if_never_cut_otherwise(group: None, ranks_of: RanksOf, models: dict[str, str]) -> None:
    """Five steps, one with each cut, moments and counts of steps carried along, are five steps of one engine."""
    engine = toy_engine(models["qwen2"])
    metrics = train(engine, range(len(NAMES)))
    weights = exported(engine)
    last = ranks_of(2)[0]["resharding"][NAMES[-1]]
    assert distance(last["saved"], weights) < 1e-6
    start = exported(toy_engine(models["qwen2"]))
    moved = {name: weight - start[name] for name, weight in weights.items()}
    actual = {name: weight - start[name] for name, weight in last["saved"].items()}
    assert distance(actual, moved) < 1e-3, "of how far the weights have come"
    following = train(engine, range(len(NAMES), len(NAMES) + 2))
    torch.testing.assert_close(last["metrics"][0]["grad_norm"], following["grad_norm"], rtol=1e-5, atol=0)
    assert metrics["lr"].tolist() == [1e-4] * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_export_of_a_checkpoint(ranks_of: RanksOf, path: Path, tmp_path: Path, name: str) -> None:
    """By main_export, in one process without Megatron."""
    saved = ranks_of(2)[0]["resharding"][name]["saved"]
    export(path / name, tmp_path, trust_remote_code=False)
    assert check(tmp_path, trust_remote_code=False) == sum(weight.numel() for weight in saved.values())
    assert_same_bits(dict(plain_model(str(tmp_path)).state_dict()), saved)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: written.get(name) for name in SAMPLING} == SAMPLING


@pytest.mark.parametrize("name", ["tp2", "distributed"])
def test_half_precision_keeps_float32_copies(ranks_of: RanksOf, path: Path, models: dict[str, str], name: str) -> None:
    """Of the model's own weights at first, not of what bfloat16 left of them; they are saved, and it continues from them."""
    for rank in ranks_of(2):
        found = rank["half_precision"][name]
        assert_same_bits(*found["metrics"])
        assert_same_bits(*found["weights"])
    first = read_weights(path / f"half {name} 0", WEIGHTS, torch.float32)
    assert_same_bits(first, dict(plain_model(models["three"]).state_dict()))
    exact = read_weights(path / f"half {name}", WEIGHTS, torch.float32)
    rounded = {key: weight.bfloat16() for key, weight in exact.items()}
    assert_same_bits(rounded, found["saved"])
    assert any(not torch.equal(weight, rounded[key].float()) for key, weight in exact.items())
