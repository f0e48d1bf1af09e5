"""From a trainer to an engine, and back to see whether it arrived."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.common import Dtype
from tests.workers.rollout.engines import ModelSource, make_model, one_off, request, spec_of, spoil_loading, weight_sync
from workers.metric import plain_numbers
from workers.rollout.embedded.embedded_engine import EmbeddedRollout
from workers.rollout.verification import TURNS, WeightMismatch

NAMES = [
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.k_proj.bias",
    "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_model(tmp_path_factory.mktemp("model"))


def engine_of(model: PreTrainedModel, dtype: Dtype = "float32") -> EmbeddedRollout:
    return EmbeddedRollout(spec_of(model.config._name_or_path, dtype=dtype))


def sync_of(engine: EmbeddedRollout, source: ModelSource, mode: Any, dtype: Dtype = "float32") -> Any:
    return weight_sync(engine, source, spec_of("somewhere", dtype=dtype), mode)


def nbytes(model: PreTrainedModel, itemsize: int) -> int:
    return sum(weight.numel() * itemsize for weight in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["off", "sample", "full"])
def test_loaded_weights_are_the_trainers(model: PreTrainedModel, mode: str, dtype: Dtype) -> None:
    engine, source = engine_of(model, dtype), ModelSource(model)
    sync = sync_of(engine, source, mode, dtype)
    read = 0.0
    for version in range(9, 9 + TURNS):
        shared, metrics = sync(version)
        assert shared is False
        read += plain_numbers(metrics).get("rollout/verified_bytes", 0.0)
    whole = nbytes(model, torch.finfo(engine.model.module.dtype).bits // 8)
    assert read == {"off": 0, "sample": whole, "full": whole * TURNS}[mode]
    assert set(metrics) == (set() if mode == "off" else {"timing_s/verify_weights", "rollout/verified_bytes"})
    for name, weight in engine.model.module.named_parameters():
        assert torch.equal(weight, model.get_parameter(name).to(weight.dtype))
    assert engine.generate([request(0, (2, 3))])[0].versions[-1] == 8 + TURNS
    assert set(source.streams) == {engine.model.module.dtype}


def test_after_going_back_the_same_is_verified_as_after_a_resume(model: PreTrainedModel) -> None:
    def verified(sync: Any, versions: list[int]) -> list[float]:
        return [plain_numbers(sync(version)[1])["rollout/verified_bytes"] for version in versions]

    went_back = sync_of(engine_of(model), ModelSource(model), "sample")
    verified(went_back, [0, 1, 2, 3, 4, 5])
    resumed = sync_of(engine_of(model), ModelSource(model), "sample")
    assert verified(went_back, [2, 3, 4]) == verified(resumed, [2, 3, 4])
    assert len(set(verified(went_back, [4] * 8))) > 1, "the same version again takes its turn too"


@pytest.mark.parametrize("name", NAMES)
def test_one_number_that_is_off_ends_the_run(model: PreTrainedModel, name: str) -> None:
    """At once if all is read, within 64 syncs if samples are, never if nothing is."""
    found = {}
    for mode in ("full", "sample", "off"):
        engine, source = engine_of(model), ModelSource(model)
        spoil_loading(engine, one_off(name, 7))
        sync = sync_of(engine, source, mode)
        for version in range(TURNS):
            try:
                sync(version)
            except WeightMismatch as error:
                assert f"{name} in embedded on rank 0 is not the trainer's, weights of version {version}: 1 of " in str(error)
                assert "read are off, by 0.1 at most" in str(error) and "\n" not in str(error)
                found[mode] = version
                break
        assert source.given % len(list(model.parameters())) == 0, "other ranks wait for the rest of the stream"
    assert found.pop("full") == 0 and found.keys() == {"sample"}


def test_a_tensor_that_is_lost_is_found_by_64_samples(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    sync = sync_of(engine, ModelSource(model), "sample")
    sync(0)
    spoil_loading(engine, lambda name, tensor: torch.zeros_like(tensor) if name == NAMES[4] else tensor)
    with pytest.raises(WeightMismatch, match=NAMES[4]):
        for version in range(1, 1 + TURNS):
            sync(version)


def test_what_changes_inside_the_engine_after_it_has_loaded_is_found(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    load = engine.load_weights

    def load_and_spoil(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        load(weights, version)
        with torch.no_grad():
            engine.model.module.get_parameter(NAMES[2])[3] = 5.0

    engine.load_weights = load_and_spoil  # type: ignore[method-assign]
    with pytest.raises(WeightMismatch, match=NAMES[2]):
        sync_of(engine, ModelSource(model), "full")(0)


@pytest.mark.parametrize("tied", [False, True])
def test_shared_weights_are_proven_by_being_the_same(tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, tie_word_embeddings=tied)
    engine, source = engine_of(model), ModelSource(model, lends=True)
    shared, metrics = sync_of(engine, source, "sample")(0)
    places = nbytes(model, 4) + (model.get_input_embeddings().weight.nbytes if tied else 0)
    assert shared is True and plain_numbers(metrics)["rollout/verified_bytes"] == places and source.given == 0
    share = engine.share_weights

    def lose_one(weights: dict[str, Tensor], version: int) -> bool:
        done = share(weights, version)
        head = engine.model.module.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())
        return done

    engine.share_weights = lose_one  # type: ignore[method-assign]
    with pytest.raises(WeightMismatch, match="model.embed_tokens.weight" if tied else "lm_head.weight"):
        sync_of(engine, source, "sample")(1)
    assert sync_of(engine, source, "off")(2) == (True, {})


def test_weights_that_the_engine_cannot_share_are_loaded(model: PreTrainedModel) -> None:
    engine, source = engine_of(model, "bfloat16"), ModelSource(model, lends=True)
    shared, metrics = sync_of(engine, source, "full", "bfloat16")(0)
    assert shared is False and plain_numbers(metrics)["rollout/verified_bytes"] == nbytes(model, 2)


def test_the_engine_may_sleep_between_syncs(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    sync = sync_of(engine, ModelSource(model), "full")
    for version in range(2):
        engine.sleep()
        engine.wake(weights=True, kv_cache=False)
        assert plain_numbers(sync(version)[1])["rollout/verified_bytes"] == nbytes(model, 4)
