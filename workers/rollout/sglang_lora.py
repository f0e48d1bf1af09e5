"""A LoRA adapter as SGLang takes it: one rank, one scaling, and of linear layers that it has as one, all or none."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.common import ModelConfig
from workers.engine.hf_model import empty_model, model_config
from workers.engine.lora import adapter_config
from workers.rollout.sglang_scheduler import AdapterPlace
from workers.rollout.weights import ExpectedWeights

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""SGLang's linear layers, and which of transformers' they are, in this order."""
LAYER_OF = {leaf: layer for layer, leaves in FUSED.items() for leaf in leaves}
TAKEN = re.compile(rf"(.+\.layers\.\d+\.(?:self_attn|mlp))\.({'|'.join(LAYER_OF)})\.lora_[AB]\.default\.weight")


class Adapter:
    """A model's adapter between the trainer and SGLang.

    expected: what comes from the trainer, under peft's names for files; places: where SGLang has it. zeros: what SGLang wants
    besides; an adapter of q_proj alone is one of k_proj and v_proj too, that changes nothing.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        """model: without weights; it has the adapter afterwards. Raises ValueError for one that SGLang cannot have."""
        various = {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern, "use_dora": config.use_dora}
        refuse([f"{key}={value}" for key, value in various.items() if value])
        inject_adapter_in_model(deepcopy(config), model, low_cpu_mem_usage=True)
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        refuse([name for name in trained if not TAKEN.fullmatch(name)])
        self.expected = ExpectedWeights({in_files(name): weight for name, weight in trained.items()})
        self.rank = config.r
        self.zeros: dict[str, tuple[int, int]] = {}
        self.places: dict[str, AdapterPlace] = {}
        self._modules: set[str] = set()
        for path, layer in sorted({(match[1], LAYER_OF[match[2]]) for match in map(TAKEN.fullmatch, trained) if match}):
            self._place(model.get_submodule(path), path, layer)

    def _place(self, block: nn.Module, path: str, layer: str) -> None:
        leaves = FUSED[layer]
        linear = [cast(nn.Linear, block.get_submodule(leaf)) for leaf in leaves]
        self._modules.update(leaves)
        for side, shapes in {
            "A": [(self.rank, one.in_features) for one in linear],
            "B": [(one.out_features, self.rank) for one in linear],
        }.items():
            for part, leaf in enumerate(leaves):
                name = in_files(f"{path}.{leaf}.lora_{side}.default.weight")
                if name in self.expected.shapes:
                    self.places[name] = AdapterPlace(f"{path}.{layer}", side, tuple(shapes), part)
                else:
                    self.zeros[name] = shapes[part]

    def arguments(self) -> dict[str, Any]:
        """Of SGLang's ServerArgs. Beside the adapter there is a place for none, which SGLang's own calls are with."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": sorted(self._modules),
            "max_loras_per_batch": 2,
            "lora_strict_loading": True,
        }

    def complete(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [*named, *((name, torch.zeros(shape)) for name, shape in self.zeros.items())]

    def in_words(self, config: LoraConfig) -> dict[str, Any]:
        """peft's configuration as SGLang reads it, to which the scaling is lora_alpha / r, whatever ``use_rslora`` says."""
        scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
        return {"peft_type": "LORA", "r": config.r, "lora_alpha": scaling * config.r, "target_modules": sorted(self._modules)}


def adapter_of(model: ModelConfig) -> Adapter:
    """Raises ValueError for one that SGLang cannot have."""
    config = adapter_config(model)
    assert config is not None, "with lora_sync=adapter there is one: the configuration has been checked"
    return Adapter(empty_model(model, model_config(model, "lm"), "lm", torch.float32).hf, config)


def in_files(name: str) -> str:
    """A parameter's name as peft writes it."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def refuse(what: list[str]) -> None:
    if what:
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        raise ValueError(
            f"actor_rollout_ref.rollout.lora_sync=adapter: SGLang takes no adapter with {what[0]}{more}: it takes those of one "
            f"rank and one lora_alpha, on {', '.join(LAYER_OF)}; set lora_sync=merged, which brings any"
        )
