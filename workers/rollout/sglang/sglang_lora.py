"""SGLang's constraints on LoRA adapters: fused layers are adapted together, and only supported modules.

SGLang fuses q, k and v, and gate and up, and expects an adapter for all members of a fused layer or none. For members that the
trainer's adapter leaves out it receives zeros, which change nothing. Modules other than the seven of a dense block are rejected.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from configs.base.keys import ConfigError
from configs.schema.common import ModelConfig
from workers.engine.fsdp import lora
from workers.engine.hf.hf_model import empty_model, model_config
from workers.rollout.sglang.sglang_scheduler import AdapterPlace
from workers.rollout.sync.expected_weights import ExpectedWeights

if TYPE_CHECKING:
    from peft import LoraConfig

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""{SGLang's linear layer: transformers' layers that it consists of, in this order}."""
PADDED_TO = 32
"""On CPU, SGLang pads each rank's part of the MLP to a multiple of this."""
LAYER_OF = {leaf: layer for layer, leaves in FUSED.items() for leaf in leaves}
SUPPORTED = re.compile(
    rf"{re.escape(lora.PREFIX)}(.+\.layers\.\d+\.(?:self_attn|mlp))\.({'|'.join(LAYER_OF)})\.lora_[AB]\.weight"
)


class AdapterInSGLang:
    """Names, shapes and locations of an adapter's tensors in SGLang.

    expected: tensors from the trainer, under the names of peft's files. places: {name: location in SGLang}. zeros: {name: shape}
    of the tensors that SGLang requires in addition: an adapter of q_proj alone, for example, gets zeros for k_proj and v_proj.
    """

    def __init__(self, model: ModelConfig) -> None:
        """Raises ValueError for modules that SGLang cannot adapt."""
        # An empty model with the adapter injected: its names and shapes come from peft, not from a copy of peft's rules.
        packed = empty_model(model, model_config(model, "lm"), "lm", torch.float32)
        self.rank = lora.inject(packed, model, trained=False, seed=0).r
        self.expected = ExpectedWeights(lora.Adapter(packed).own)
        self.zeros: dict[str, tuple[int, int]] = {}
        self.places: dict[str, AdapterPlace] = {}
        self.sizes = packed.hf.config.get_text_config()
        # A dict as an ordered set: several tensors of the adapter belong to the same layer.
        places = dict.fromkeys(map(block_and_layer, self.expected.shapes))
        self.layers = {layer for _, layer in places}
        self.modules = sorted(leaf for layer in self.layers for leaf in FUSED[layer])
        for path, layer in places:
            self._place(packed.hf.get_submodule(path), path, layer)

    def _place(self, block: nn.Module, path: str, layer: str) -> None:
        """Record where SGLang keeps the adapter of ``layer`` in ``block``, and which members need zeros."""
        linear = [cast(nn.Linear, block.get_submodule(leaf)) for leaf in FUSED[layer]]
        stacks = {
            "A": [(self.rank, one.in_features) for one in linear],
            "B": [(one.out_features, self.rank) for one in linear],
        }
        for side, shapes in stacks.items():
            for part, leaf in enumerate(FUSED[layer]):
                name = f"{lora.PREFIX}{path}.{leaf}.lora_{side}.weight"
                if name in self.expected.shapes:
                    self.places[name] = AdapterPlace(f"{path}.{layer}", side, tuple(shapes), part)
                else:
                    self.zeros[name] = shapes[part]

    def check_even(self, ranks: int) -> None:
        """Raises ValueError if layers do not divide evenly over ``ranks``: on CPU SGLang pads them, but not their adapters."""
        attention, mlp, config = {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}, self.sizes
        for layers, key, size, step in (
            (attention, "num_attention_heads", config.num_attention_heads, ranks),
            (attention, "num_key_value_heads", config.num_key_value_heads, ranks),
            (mlp, "intermediate_size", config.intermediate_size, PADDED_TO * ranks),
        ):
            if size % step and not layers.isdisjoint(self.layers):
                raise ConfigError(
                    f"actor_rollout_ref.rollout.lora_sync=adapter: on CPU, with tensor_model_parallel_size={ranks}, SGLang takes "
                    f"an adapter of {' and '.join(sorted(layers))} if {key} is a multiple of {step}, and it is {size}; set "
                    "lora_sync=merged"
                )

    def arguments(self, device: str) -> dict[str, Any]:
        """The adapter's part of SGLang's ServerArgs.

        max_loras_per_batch=2: SGLang starts with the empty adapter, which takes one of the slots. enable_weights_cpu_backup: the
        base weights stay in host memory during sleep, because they are synchronised only once.
        """
        return {
            "enable_weights_cpu_backup": device == "cuda",
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": self.modules,
            "max_loras_per_batch": 2,
            "lora_strict_loading": True,
        }

    def complete(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Add zeros for the members of fused layers that the adapter leaves out."""
        return [*named, *((name, torch.zeros(shape)) for name, shape in self.zeros.items())]

    def sglang_config(self, config: LoraConfig) -> dict[str, Any]:
        """peft's configuration for SGLang, which always scales by lora_alpha / r and ignores ``use_rslora``.

        lora_alpha is therefore chosen such that lora_alpha / r is the scaling of peft.
        """
        scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
        return {"peft_type": "LORA", "r": config.r, "lora_alpha": scaling * config.r, "target_modules": self.modules}


def block_and_layer(name: str) -> tuple[str, str]:
    """Path of the block and name of SGLang's linear layer that an adapter weight belongs to. Raises ValueError if unsupported."""
    match = SUPPORTED.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.lora_sync=adapter: SGLang takes {', '.join(LAYER_OF)} of an adapter, and not "
            f"{name.removeprefix(lora.PREFIX)}; set lora_sync=merged, which brings any, or choose other model.target_modules"
        )
    return match[1], LAYER_OF[match[2]]
