"""One LoRA adapter in vLLM, beside the weights: how it comes, how it is computed with, and where it is. Loaded with one alone.

vLLM's layers and its loading are used; its kernels are not. They look up an adapter for each token, by ids that adapters are
cached by: one that comes under an id that is there already is passed over. On CUDA they have no float32, and on CPU they copy the
adapter for every token. Here is one, and every token has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from configs.schema.common import ModelConfig
from workers.engine.fsdp.lora import PREFIX, Adapter, inject
from workers.engine.hf.hf_model import empty_model, model_config
from workers.rollout.sync.expected_weights import ExpectedWeights
from workers.rollout.verification import HeldWeight, PlainWeight
from workers.rollout.vllm.vllm_weights import Part, parts_of

ID = 1  # the adapter's, to vLLM
RANKS = sorted(get_args(MaxLoRARanks))


class ExpectedAdapter:
    """What comes from the trainer: names and shapes. And what vLLM is told of it."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ValueError for a rank that vLLM has no place for."""
        packed = empty_model(model, model_config(model, "lm"), "lm", torch.float32)
        self.config = inject(packed, model, trained=False, seed=0)
        self.weights = ExpectedWeights(Adapter(packed).own)
        if self.config.r > RANKS[-1]:
            raise ValueError(
                f"actor_rollout_ref.rollout.lora_sync=adapter: vLLM takes adapters of rank {RANKS[-1]} at most, and this one has "
                f"{self.config.r}; set lora_sync=merged, which brings any"
            )

    def arguments(self) -> dict[str, Any]:
        """Of EngineArgs. A layer of a kind that the adapter is in gets room for it, also where the adapter leaves it out."""
        modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in self.weights.shapes}
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.config.r),
            "lora_dtype": "auto",
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in modules}),
            "fully_sharded_loras": False,
        }


class EveryToken:
    """In the place of vLLM's kernels: the one adapter, for all tokens."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """y (T, outputs) += x (T, inputs) A^T B^T, for each slice of the outputs. The adapter's own scaling is in B."""
        assert scale == 1.0 and not kwargs, "as vLLM's linear layers call it"
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + size].addmm_(x @ a[0, 0].T, b[0, 0].T)
            start += size


def for_every_token(runner: Any) -> None:
    """Of a model runner that has just made its layers: before they are compiled, and before graphs of them are kept."""
    for layer in layers_of(runner).values():
        layer.set_mapping(EveryToken())


def layers_of(runner: Any) -> Mapping[str, Any]:
    """{path in vLLM's model: layer with room for an adapter}"""
    layers: Mapping[str, Any] = runner.lora_manager._adapter_manager.modules
    return layers


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """vLLM's own layers are in their places in here, under the names that weights come with, without room for an adapter."""
    wrapped = [
        (path, layer) for path, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, BaseLayerWithLoRA)
    ]
    for path, layer in wrapped:
        model.set_submodule(path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in wrapped:
            model.set_submodule(path, layer)


def replace_adapter(worker: Any, config: LoraConfig, tensors: dict[str, Tensor]) -> None:
    """tensors: all of them, under peft's names for files, whole, on the host and nobody else's: vLLM scales them in place."""
    runner = worker.model_runner
    manager = runner.lora_manager._adapter_manager
    assert all(isinstance(layer.punica_wrapper, EveryToken) for layer in layers_of(runner).values()), "worker_cls is another"
    described = PEFTHelper(config.r, config.lora_alpha, target_modules=[], use_rslora=config.use_rslora)
    adapter = LoRAModel.from_lora_tensors(ID, tensors, described, device="cpu", dtype=runner.lora_config.lora_dtype)
    manager.remove_all_adapters()  # else the one that is there stays
    added, activated = manager.add_adapter(adapter), manager.activate_adapter(ID)
    assert added and activated, "vLLM has an adapter of this id"


def held_adapter(worker: Any, expected: ExpectedAdapter) -> list[HeldWeight]:
    """Where this rank has the adapter: padded to vLLM's rank, cut as the layer's weight is, B with the scaling in it."""
    runner, config = worker.model_runner, expected.config
    fused: Mapping[str, Sequence[str]] = runner.lora_manager._adapter_manager.packed_modules_mapping
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    found: list[HeldWeight] = []
    for path, layer in layers_of(runner).items():
        weight = f"{path}.weight"
        whole = Part(weight, 0, sum(layer.output_slices), 0, 0, sum(layer.output_slices))
        for i, part in enumerate(parts_of(path, "weight", layer.base_layer, fused, {}) or [whole]):
            a, b = (f"{PREFIX}{part.name.removesuffix('.weight')}.lora_{side}.weight" for side in "AB")
            if a in expected.weights.shapes:  # the adapter need not be in all parts of a layer
                found.append(PlainWeight(a, partial(held_a, layer, i), partial(wanted_a, layer, part)))
                found.append(PlainWeight(b, partial(held_b, layer, i, part), partial(wanted_b, layer, part, scaling)))
    return found


def held_a(layer: Any, i: int) -> Tensor:
    """(vLLM's rank, inputs of this rank). Of layers that are fused in the trainer too there is one for all parts."""
    stacked: Sequence[Tensor] = layer.lora_a_stacked
    return stacked[i if len(stacked) > 1 else 0][0, 0]


def held_b(layer: Any, i: int, part: Part) -> Tensor:
    """(rows of the part, vLLM's rank)"""
    stacked: Sequence[Tensor] = layer.lora_b_stacked
    return stacked[i][0, 0] if len(stacked) > 1 else stacked[0][0, 0].narrow(0, part.row, part.rows)


def wanted_a(layer: Any, part: Part, a: Tensor) -> Tensor:
    cut = part.of(a) if part.dim == 1 else a
    return F.pad(cut, (0, 0, 0, layer.lora_a_stacked[0].shape[2] - len(a)))


def wanted_b(layer: Any, part: Part, scaling: float, b: Tensor) -> Tensor:
    """Rounded as vLLM does it: cast, then scaled."""
    stacked = layer.lora_b_stacked[0]
    cut = part.of(b) if part.dim == 0 else b
    return F.pad(cut.to(stacked.dtype) * scaling, (0, stacked.shape[3] - b.shape[1]))
