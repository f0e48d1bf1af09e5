"""What goes to an engine that takes the adapter alone. What real engines hold of it, their own tests see."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.cases import train
from tests.workers.engine.toy import ADAMW, one_rank, toy_engine
from tests.workers.rollout.engines import request, spec_of
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.metric import plain_numbers
from workers.rollout.embedded.embedded_engine import EmbeddedRollout
from workers.rollout.sync.weight_sync import WeightSync


class Taker:
    """Of a rollout engine, what is called here."""

    def __init__(self, *, keeps_weights: bool) -> None:
        self.keeps_weights = keeps_weights
        self.calls: list[tuple[str, int]] = []
        self.base: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}
        self.config: LoraConfig | None = None

    def to_engine_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False) -> None:
        self.calls.append(("base", version))
        self.base = {name: weight.clone() for name, weight in weights}

    def load_adapter(
        self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False
    ) -> None:
        self.calls.append(("adapter", version))
        self.config, self.adapter = config, {name: weight.clone() for name, weight in weights}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FSDPEngine]:
    with one_rank(tmp_path):
        yield toy_engine(save_tiny_model(tmp_path / "model"), lora_rank=2)


def sync_of(taker: Taker, source: FSDPEngine, **changes: Any) -> WeightSync:
    config = replace(spec_of("somewhere", verify_weights="off", lora_sync="adapter").rollout, **changes)
    return WeightSync(cast(Any, taker), source, config, rank=0)


@pytest.mark.parametrize(("keeps", "sleeps", "bases"), [(True, True, 1), (False, False, 1), (False, True, 3)])
def test_the_base_goes_once_unless_it_is_lost_in_sleep(engine: FSDPEngine, keeps: bool, sleeps: bool, bases: int) -> None:
    taker = Taker(keeps_weights=keeps)
    sync = sync_of(taker, engine, free_cache_engine=sleeps)
    base = {name: weight.clone() for name, weight in engine.export_weights(kind="full")}
    for version in range(3):
        assert sync(version) == (False, {})
        trained = dict(engine.export_weights(kind="adapter"))
        assert all((taker.adapter[name] == weight).all() for name, weight in trained.items())
        train(engine, range(1))
    assert [call for call in taker.calls if call[0] == "adapter"] == [("adapter", version) for version in range(3)]
    assert [call for call in taker.calls if call[0] == "base"] == [("base", version) for version in range(bases)]
    assert taker.calls[0][0] == "base" and taker.config == engine.adapter_config
    assert taker.base.keys() == base.keys() and all((taker.base[name] == weight).all() for name, weight in base.items())


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Plain transformers, no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_after_each_of_three_rounds_the_engine_answers_as_pefts_merged_model(tmp_path: Path) -> None:
    """A sync that leaves the engine at the first policy is LoRA's commonest fault."""
    path = save_tiny_model(tmp_path / "model")
    prompts = [(2, 3), (5, 9, 12), (40, 7, 33, 21)]
    seen = set()
    with one_rank(tmp_path):
        engine = toy_engine(path, lora_rank=4, optimizer=replace(ADAMW, lr=0.02))
        rollout = EmbeddedRollout(spec_of(path))
        sync = WeightSync(rollout, engine, replace(spec_of(path).rollout, verify_weights="full"), rank=0)
        for version in range(3):
            train(engine, range(version, version + 1))
            shared, metrics = sync(version)
            assert shared is False and plain_numbers(metrics)["rollout/verified_bytes"] > 0
            assert engine.adapter_config is not None
            engine.adapter_config.save_pretrained(str(tmp_path / f"adapter-{version}"))
            weights = {name: weight.clone() for name, weight in engine.export_weights(kind="adapter")}
            save_file(weights, tmp_path / f"adapter-{version}/adapter_model.safetensors")
            expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / f"adapter-{version}")
            merged = expected.merge_and_unload().eval()
            asked = [request(i, prompt, temperature=0.0, max_tokens=12, stop_token_ids=()) for i, prompt in enumerate(prompts)]
            answers = [completion.token_ids for completion in rollout.generate(asked)]
            assert answers == [greedy(merged, prompt, 12) for prompt in prompts]
            seen.add(tuple(answers))
    assert len(seen) == 3, "each round another policy"


def test_whole_weights_go_otherwise(engine: FSDPEngine) -> None:
    taker = Taker(keeps_weights=True)
    taker.share_weights = lambda weights, version: pytest.fail("the base alone would be shared")  # type: ignore[attr-defined]
    sync = sync_of(taker, engine, lora_sync="merged")
    for version in range(2):
        train(engine, range(1))
        sync(version)
        assert all((taker.base[name] == weight).all() for name, weight in engine.export_weights())
    assert taker.calls == [("base", 0), ("base", 1)]
