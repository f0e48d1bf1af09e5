"""Saved, loaded and continued is the same as never stopped."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.fsdp.cases import exported, shards, train, training_batch
from tests.workers.engine.toy import ADAMW, Shifted, ValueLoss, cut, distance, toy_engine


def assert_same_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    assert [name for name, tensor in some.items() if not torch.equal(tensor, others[name])] == []


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_resume_on_one_rank_is_bitwise_identical(group: None, models: dict[str, str], tmp_path: Path, schedule: Any) -> None:
    fields = {name: getattr(ADAMW, name) for name in ADAMW.__slots__} | {"schedule": schedule, "warmup_steps": 3}
    engine, resumed = (toy_engine(models["qwen3"], optimizer=type(ADAMW)(**fields)) for _ in range(2))
    train(engine, range(2))
    engine.save(str(tmp_path / "checkpoint"))
    metrics = train(engine, range(2, 5))
    resumed.load(str(tmp_path / "checkpoint"))
    assert_same_bits(train(resumed, range(2, 5)), metrics)
    assert_same_bits(shards(resumed), shards(engine))


def test_the_moving_average_is_saved_resumed_and_offloaded(group: None, models: dict[str, str], tmp_path: Path) -> None:
    """It is what the plain formula gives after each update that is applied, and none that is skipped."""
    optimizer = replace(ADAMW, ema_decay=0.9)
    engine, resumed = (toy_engine(models["qwen2"], optimizer=optimizer, optimizer_offload=True) for _ in range(2))
    expected = {name: weight.double() for name, weight in exported(engine).items()}
    for step in range(2):
        train(engine, range(step, step + 1))
        expected = {name: 0.9 * expected[name] + 0.1 * weight.double() for name, weight in exported(engine).items()}
        (share,), (plan,) = cut(training_batch(step), max_tokens=80)
        assert engine.train_step(share, plan, Shifted(math.nan))["skipped_updates"].value == 1
    averages = {name.removeprefix("ema."): held for name, held in shards(engine).items() if name.startswith("ema.")}
    assert averages.keys() == expected.keys() and distance(averages, expected) < 1e-6
    assert distance(averages, exported(engine)) > 1e-5
    engine.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    train(engine, range(3, 5))
    train(resumed, range(3, 5))
    assert_same_bits(shards(resumed), shards(engine))
    with pytest.raises(ValueError, match=r"no optimizer\.ema\..* in this checkpoint"):
        toy_engine(models["qwen2"]).save(str(tmp_path / "without"))
        resumed.load(str(tmp_path / "without"))


def test_resume_on_two_ranks_is_bitwise_identical(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in two_ranks[1]:
        for kind in ("metrics", "shards"):
            uninterrupted, *others = rank["checkpoint"][kind]
            for other in others:
                assert_same_bits(other, uninterrupted)


def test_two_ranks_checkpoint_on_one(group: None, two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str]) -> None:
    path, (first, _) = two_ranks
    engine = toy_engine(models["qwen2"])
    engine.load(str(path / "checkpoint"))
    assert_same_bits(exported(engine), first["checkpoint"]["saved"])
    metrics = train(engine, range(2, 4))
    torch.testing.assert_close(metrics["grad_norm"], first["checkpoint"]["metrics"][0]["grad_norm"], rtol=1e-5, atol=0)
    assert distance(exported(engine), first["checkpoint"]["weights"]) < 1e-6


def test_one_ranks_checkpoint_on_two(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    found = [rank["from_one_rank"] for rank in two_ranks[1]]
    assert_same_bits(found[0]["loaded"], found[0]["saved"])
    assert_same_bits(found[1]["loaded"], found[0]["saved"])
    torch.testing.assert_close(found[0]["grad_norm"], found[0]["grad_norm_on_one"], rtol=1e-5, atol=0)


def test_a_value_head_of_one_row_over_two_ranks(
    group: None, two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str]
) -> None:
    """The second rank holds none of the head, and answers all the same."""
    first, second = (rank["value_head"] for rank in two_ranks[1])
    assert_same_bits(first["weights"], second["weights"])
    assert_same_bits(first["resumed"], first["weights"])
    assert first["weights"]["score.weight"].any()
    engine = toy_engine(models["qwen2"], "value")
    metrics = train(engine, range(3), ValueLoss())
    torch.testing.assert_close(first["metrics"]["loss"] + second["metrics"]["loss"], metrics["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["metrics"]["grad_norm"], metrics["grad_norm"], rtol=1e-5, atol=1e-6)
    assert distance(first["weights"], exported(engine)) < 1e-6


def test_what_is_not_a_checkpoint_of_this_model(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = toy_engine(models["qwen2"])
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        engine.load(str(tmp_path / "nothing"))
    toy_engine(models["qwen2"], optimizer=None).save(str(tmp_path / "reference"))
    with pytest.raises(ValueError, match=r"no optimizer\.steps in this checkpoint"):
        engine.load(str(tmp_path / "reference"))
    toy_engine(models["qwen2"], override_config={"intermediate_size": 64}).save(str(tmp_path / "same"))
    engine.load(str(tmp_path / "same"))
    toy_engine(models["llama"], optimizer=None).save(str(tmp_path / "llama"))
    with pytest.raises(ValueError, match=r"no model\.model\.layers\.0\.self_attn\.q_proj\.bias in this checkpoint"):
        toy_engine(models["qwen2"], optimizer=None).load(str(tmp_path / "llama"))


def test_loading_runs_no_pickle(group: None, models: dict[str, str], tmp_path: Path) -> None:
    toy_engine(models["qwen2"]).save(str(tmp_path))
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}
