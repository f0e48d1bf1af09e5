"""A trainer of a LoRA adapter by plain peft, which shares no code with this project, and the engine's side of its syncs."""

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.common import ModelConfig
from workers.engine.base import Weights


class AdapterSource:
    """given: what was asked for, whole weights or the adapter, once for each time."""

    def __init__(self, base: PreTrainedModel, model: ModelConfig, device: str = "cpu") -> None:
        """device: where the weights come from, as a trainer's do. They are kept on the CPU."""
        self.base, self.given, self.device = base, list[Weights](), device
        self.adapter_config = LoraConfig(
            r=model.lora_rank, lora_alpha=cast(int, model.lora_alpha), target_modules=cast(Any, model.target_modules)
        )
        self.peft = get_peft_model(copy.deepcopy(base), copy.deepcopy(self.adapter_config))
        self.change(0)

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """Another adapter: what it adds to a weight has a tenth of the weight's size, or a third."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.peft.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * (0.02 if "lora_B" in name else 0.1))

    def weights(self) -> dict[str, Tensor]:
        """Under peft's names for files: the trainer's own tensors."""
        return get_peft_model_state_dict(self.peft)

    def merged(self) -> PreTrainedModel:
        return cast(PreTrainedModel, copy.deepcopy(self.peft).merge_and_unload()).eval()

    def live_weights(self) -> None:
        return None

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        self.given.append(kind)
        named = {"full": self.base.named_parameters, "adapter": self.weights().items}[kind]()
        yield from ((name, weight.to(self.device)) for name, weight in named)
