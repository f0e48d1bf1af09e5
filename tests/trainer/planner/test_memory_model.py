"""The memory model compared with the engine's peak: bytes of live tensors, on CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.common import TiledMLPConfig
from scripts.bench.context import CARDS, rounded, tables, usable
from scripts.bench.memory import Alive
from scripts.bench.shapes import SHAPES, Likelihood
from tests.tiny import save_tiny_model
from tests.workers.engine.toy import one_rank, toy_engine
from trainer.planner.memory_model import (
    Setting,
    Shape,
    gathered,
    gathering,
    in_layer,
    layer_inputs,
    longest,
    parameters,
    reserved,
    scoring,
    training,
)
from workers.batch import Batch
from workers.engine.fsdp import units
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import local

SOAK = pytest.mark.soak
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 640,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def a_layer_is_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every larger model, and where these rows were measured."""
    monkeypatch.setattr(units, "UNIT_PARAMETERS", 1)


def fullest(folder: Path, config: dict[str, Any], setting: Setting, tokens: int, *, forward: bool = False) -> int:
    """Peak bytes in a train step or a forward pass."""
    with one_rank(folder):
        engine = toy_engine(
            save_tiny_model(folder / "model", **config),
            dtype={2: "bfloat16", 4: "float32"}[setting.compute],
            model_dtype={2: "bfloat16", 4: "float32"}[setting.kept],
            enable_gradient_checkpointing=setting.recompute,
            tiled_mlp=TiledMLPConfig(enabled=setting.pieces > 1, num_shards=setting.pieces),
        )
        assert sum(param.numel() for param in engine._params.values()) == Shape.of(config).parameters
        rows = 2 if setting.several else 1
        run(engine, config, 8, 1, forward=forward)  # allocate everything that is allocated once
        alive = Alive([local(param) for param in engine._params.values()])
        if engine._optimizer is not None:
            alive = Alive([*(local(param) for param in engine._params.values()), *engine._optimizer.moments().values()])
        with alive:
            run(engine, config, tokens, rows, forward=forward)
    return alive.most


def run(engine: FSDPEngine, config: dict[str, Any], tokens: int, rows: int, *, forward: bool) -> None:
    total = tokens * rows
    batch = Batch(lengths=torch.tensor([tokens] * rows), meta={"temperature": 1.0}).with_tokens(
        input_ids=torch.arange(total) % config["vocab_size"],
        response_mask=torch.ones(total, dtype=torch.int64),
        loss_weight=torch.full((total,), 1.0 / total),
    )
    plan = tuple((row,) for row in range(rows))
    if forward:
        engine.forward(batch, plan, {"log_probs"})
    else:
        engine.train_step(batch, plan, Likelihood())


@pytest.mark.parametrize(
    ("changes", "setting", "tokens"),
    [
        ({}, Setting(), 1024),
        pytest.param(*({}, Setting(), 4096), marks=SOAK),
        pytest.param(*({"num_hidden_layers": 12}, Setting(), 1024), marks=SOAK),
        pytest.param(*({"hidden_size": 256}, Setting(), 2048), marks=SOAK),
        pytest.param(*({"intermediate_size": 1280}, Setting(kept=2), 2048), marks=SOAK),
        ({"vocab_size": 4096, "tie_word_embeddings": True}, Setting(), 1024),
        ({}, Setting(several=True), 1024),
        ({}, Setting(pieces=8), 1024),
        ({}, Setting(compute=4), 1024),
        pytest.param(*({}, Setting(compute=4, several=True), 512), marks=SOAK),
        pytest.param(*({"num_hidden_layers": 12, "hidden_size": 256}, Setting(compute=4), 256), marks=SOAK),
        pytest.param(*({}, Setting(several=True), 2048), marks=SOAK),
        pytest.param(*({}, Setting(pieces=8), 2048), marks=SOAK),
        pytest.param(*({"intermediate_size": 2560}, Setting(pieces=4), 1024), marks=SOAK),
    ],
)
def test_peak_of_a_train_step_equals_the_model(tmp_path: Path, changes: dict[str, Any], setting: Setting, tokens: int) -> None:
    config = SMALL | changes
    message = sum(training(Shape.of(config), replace(setting, cuda=False), tokens).values())
    assert message == pytest.approx(fullest(tmp_path, config, setting, tokens), rel=0.05)


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_units_of_several_layers_take_no_more_than_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    shape = Shape.of(SMALL | {"num_hidden_layers": 8})
    monkeypatch.setattr(units, "UNIT_PARAMETERS", layers * shape.layer_parameters)
    predicted = sum(training(shape, Setting(cuda=False), 1024).values())
    measured = fullest(tmp_path, SMALL | {"num_hidden_layers": 8}, Setting(), 1024)
    assert 0.95 * measured < predicted < 1.3 * measured


def copied(shape: Shape) -> float:
    """Bytes that FSDP's copies of bfloat16 parameters took when these rows were measured; one rank has none today."""
    return gathered(shape, Setting(), 2)


@pytest.mark.parametrize(
    ("changes", "several", "compute", "tokens"),
    [
        ({}, False, 2, 1024),
        ({"hidden_size": 256}, True, 4, 512),
        pytest.param({"num_hidden_layers": 12}, False, 2, 1024, marks=SOAK),
        pytest.param({}, False, 4, 4096, marks=SOAK),
        pytest.param({"hidden_size": 256}, True, 2, 2048, marks=SOAK),
        pytest.param({"vocab_size": 4096}, False, 2, 1024, marks=SOAK),
        pytest.param({"num_hidden_layers": 8, "intermediate_size": 320}, False, 2, 512, marks=SOAK),
    ],
)
def test_peak_without_recomputation(tmp_path: Path, changes: dict[str, Any], several: bool, compute: int, tokens: int) -> None:
    """7B on an H200 (docs/performance.md): 100.1 GB."""
    config, setting = SMALL | changes, Setting(recompute=False, several=several, compute=compute)
    message = sum(training(Shape.of(config), replace(setting, cuda=False), tokens).values())
    assert message == pytest.approx(fullest(tmp_path, config, setting, tokens), rel=0.05)
    on_h200 = training(Shape.of(SHAPES["7b"]), Setting(kept=2, recompute=False), 8192)
    assert sum(on_h200.values()) + copied(Shape.of(SHAPES["7b"])) == pytest.approx(100.1e9, rel=0.02)


@pytest.mark.parametrize(("changes", "pieces"), [({}, 1), ({"intermediate_size": 1280}, 8), ({"vocab_size": 8192}, 1)])
def test_peak_of_log_probs_equals_the_model(tmp_path: Path, changes: dict[str, Any], pieces: int) -> None:
    config, setting = SMALL | changes, Setting(pieces=pieces)
    message = sum(scoring(Shape.of(config), replace(setting, cuda=False), 2048).values())
    found = fullest(tmp_path, config, setting, 2048, forward=True)
    assert message == pytest.approx(found, rel=0.05)


def test_cache_of_other_streams_is_that_of_the_reduction() -> None:
    """Snapshot of 1.5B on one H200: 6.17 GB of reduced gradients, 1.17 GB of the root's float32 copy and of small blocks."""
    shape, setting = Shape.of(SHAPES["1.5b"]), Setting(several=True, no_sync=True)
    cached = reserved(shape, setting, 16384) - sum(training(shape, setting, 16384).values())
    assert cached == 4.0 * shape.parameters + 4 * shape.root_parameters == pytest.approx(7.34e9, rel=0.035)
    shape, sharded = Shape.of(SHAPES["7b"]), Setting(gpus=2, several=True)
    cached = reserved(shape, sharded, 16384) - sum(training(shape, sharded, 16384).values())
    assert cached == 6.0 * shape.root_parameters, "the sharded sums are at every peak; the root's copy and its shard are not"
    assert gathering(shape, sharded) == 2 * (shape.root_parameters + shape.layer_parameters) and gathering(shape, setting) == 0
    frozen = Setting(trained=False)
    assert reserved(shape, frozen, 16384) == sum(training(shape, frozen, 16384).values())


# (row of scripts/test_gpu.sh, GB in an update by the model without caches, roles, the driver's count): two H200s, docs/gpu.md.
UPDATES = [("grpo-7b-tp1", 91.6, 2, 103.1), ("grpo-7b-tp2", 62.7, 2, 74.3), ("dapo-7b", 76.3, 1, 84.4)]


@pytest.mark.parametrize(("row", "tensors", "roles", "gigabytes"), UPDATES)
def test_update_with_caches_is_what_the_driver_counted(row: str, tensors: float, roles: int, gigabytes: float) -> None:
    shape, setting = Shape.of(SHAPES["7b"]), Setting(gpus=2, several=True)
    cached = reserved(shape, setting, 16384) - sum(training(shape, setting, 16384).values()) + roles * gathering(shape, setting)
    assert tensors + cached / 1e9 == pytest.approx(gigabytes, rel=0.015), row


def test_sharded_bytes_are_divided_by_the_ranks() -> None:
    shape, rows = Shape.of(SHAPES["7b"]), 32768
    one, eight = Setting(), Setting(gpus=8)
    assert parameters(shape, eight) == parameters(shape, one) / 8
    cut = in_layer(shape, Setting(gpus=8, sp=8), rows, 28)
    whole = in_layer(shape, eight, rows, 28)
    for part in ("layer inputs", "MLP"):
        assert cut[part] == whole[part] / 8
    # Each of 8 ranks has one of 4 key heads: twice as many bytes as without sharding.
    assert whole["norms, attention"] / 8 < cut["norms, attention"] < whole["norms, attention"] / 7
    assert layer_inputs(shape, Setting(offload=True), 28) == layer_inputs(shape, one, 1)


@pytest.mark.parametrize("phase", [training, scoring])
def test_longest_row_is_the_longest_that_fits(phase: Any) -> None:
    shape, room = Shape.of(SHAPES["0.5b"]), usable(24)
    found = longest(phase, shape, Setting(), room)
    assert sum(phase(shape, Setting(), found).values()) <= room < sum(phase(shape, Setting(), found + 1).values())
    assert longest(phase, Shape.of(SHAPES["72b"]), Setting(), usable(max(CARDS))) == 0


def test_rows_of_the_documented_tables() -> None:
    assert [rounded(tokens) for tokens in (999, 1000, 138_241, 1_949_999)] == ["-", "1k", "138k", "1.9M"]
    (row,) = (line for line in tables().splitlines() if line.startswith("| 72b | all weights |"))
    assert row == "| 72b | all weights |" + " - / - / - |" * 4  # 16 bytes for each of 72.7G parameters, over 8


# (shape, setting, tokens, GB of tensors at most): torch 2.11 on one H200; docs/performance.md.
MEASURED = [
    ("7b", Setting(), 8192, 131.11),
    ("7b", Setting(), 32768, 132.66),
    ("7b", Setting(), 75000, 146.53),
    ("7b", Setting(pieces=8), 98304, 137.74),
    ("7b", Setting(offload=True), 32768, 132.43),
    ("7b", Setting(offload=True, pieces=8), 65536, 132.09),
    ("7b", Setting(kept=2), 54000, 80.88),
    ("1.5b", Setting(), 84000, 39.43),
    ("0.5b", Setting(), 8192, 9.07),
    ("0.5b", Setting(), 138000, 23.83),
    ("0.5b", Setting(several=True), 65536, 16.76),
    ("0.5b", Setting(pieces=8), 131072, 17.22),
    ("0.5b", Setting(offload=True), 131072, 18.77),
    ("0.5b", Setting(offload=True, pieces=8), 131072, 13.01),
    ("7b", Setting(kept=2, trained=False), 41000, 23.77),
]


@pytest.mark.parametrize(("name", "setting", "tokens", "gigabytes"), MEASURED)
def test_model_agrees_with_measurements_on_an_h200(name: str, setting: Setting, tokens: int, gigabytes: float) -> None:
    phase = training if setting.trained else scoring
    message = sum(phase(Shape.of(SHAPES[name]), replace(setting, gqa=False), tokens).values())
    message += 0.0 if setting.wrapped else copied(Shape.of(SHAPES[name]))
    assert message / 1e9 == pytest.approx(gigabytes, rel=0.021)
