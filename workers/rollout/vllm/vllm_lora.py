"""A single LoRA adapter in vLLM: loading, computation and verification. Imported only with lora_sync=adapter.

vLLM's LoRA layers and its loading are used, but not its kernels. The kernels serve many adapters at once: they look one up per
token by an id, and ignore a new adapter under an id that is cached already. On CUDA they do not support float32, and on CPU they
copy the adapter for every token. Here one adapter applies to all tokens, so that two matrix products per layer are enough
(``EveryToken``).
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

from configs.base.keys import ConfigError
from configs.schema.common import ModelConfig
from workers.engine.fsdp.lora import PREFIX, Adapter, inject
from workers.engine.hf.hf_model import empty_model, model_config
from workers.rollout.sync.expected_weights import ExpectedWeights
from workers.rollout.verification import HeldWeight, PlainWeight
from workers.rollout.vllm.vllm_weights import Part, parts_of

ID = 1  # id of the adapter in vLLM
RANKS = sorted(get_args(MaxLoRARanks))  # the ranks that vLLM allocates room for


class ExpectedAdapter:
    """Names and shapes of the adapter's tensors from the trainer, and the engine arguments that follow from them."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ValueError for a rank above vLLM's maximum."""
        packed = empty_model(model, model_config(model, "lm"), "lm", torch.float32)
        self.config = inject(packed, model, trained=False, seed=0)
        self.weights = ExpectedWeights(Adapter(packed).own)
        if self.config.r > RANKS[-1]:
            raise ConfigError(
                f"actor_rollout_ref.rollout.lora_sync=adapter: vLLM takes adapters of rank {RANKS[-1]} at most, and this one has "
                f"{self.config.r}; set lora_sync=merged, which brings any"
            )

    def arguments(self) -> dict[str, Any]:
        """The adapter's part of EngineArgs.

        vLLM selects layers by the last component of their name: all layers of a selected name get room, even those that the
        adapter leaves out. The rank is rounded up to the next one in RANKS.
        """
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
    """Replacement for vLLM's LoRA kernels (punica_wrapper): applies the single adapter to all tokens."""

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
        """Add x A^T B^T to y in place, for each slice of the outputs; the adapter's scaling is contained in B.

        y (T, outputs), x (T, inputs). lora_a_stacked, lora_b_stacked: A and B of each slice, (1, 1, rank, inputs) and
        (1, 1, outputs of the slice, rank). output_slices: sizes of the slices.
        """
        assert scale == 1.0 and not kwargs, "as vLLM's linear layers call it"
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + size].addmm_(x @ a[0, 0].T, b[0, 0].T)
            start += size


def for_every_token(runner: Any) -> None:
    """Install EveryToken in all LoRA layers of a model runner.

    Call it right after the model is built: compilation and CUDA graphs capture the layers as they are then.
    """
    for layer in layers_of(runner).values():
        layer.set_mapping(EveryToken())


def layers_of(runner: Any) -> Mapping[str, Any]:
    """{path in vLLM's model: LoRA layer}."""
    layers: Mapping[str, Any] = runner.lora_manager._adapter_manager.modules
    return layers


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Context in which the LoRA layers are replaced by the base layers that they wrap, so that weights have their usual names."""
    # Collected before anything is replaced: set_submodule changes the tree that named_modules iterates over.
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
    """Replace the adapter of a worker.

    tensors: the complete adapter under the names of peft's files, full tensors on CPU. They must not be shared: vLLM scales them
    in place.
    """
    runner = worker.model_runner
    manager = runner.lora_manager._adapter_manager
    assert all(isinstance(layer.punica_wrapper, EveryToken) for layer in layers_of(runner).values()), "worker_cls is another"
    described = PEFTHelper(config.r, config.lora_alpha, target_modules=[], use_rslora=config.use_rslora)
    adapter = LoRAModel.from_lora_tensors(ID, tensors, described, device="cpu", dtype=runner.lora_config.lora_dtype)
    manager.remove_all_adapters()  # otherwise vLLM keeps the old one, which has the same id
    added, activated = manager.add_adapter(adapter), manager.activate_adapter(ID)
    assert added and activated, "vLLM has an adapter of this id"


def held_adapter(worker: Any, expected: ExpectedAdapter) -> list[HeldWeight]:
    """The adapter's tensors as this rank computes with them.

    They are padded to vLLM's rank and sharded like the layer's weight, and B is multiplied by the scaling.
    """
    runner, config = worker.model_runner, expected.config
    fused: Mapping[str, Sequence[str]] = runner.lora_manager._adapter_manager.packed_modules_mapping
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    found: list[HeldWeight] = []
    for path, layer in layers_of(runner).items():
        weight = f"{path}.weight"
        whole = Part(weight, 0, sum(layer.output_slices), 0, 0, sum(layer.output_slices))
        # No parts: the layer is the trainer's as a whole.
        for i, part in enumerate(parts_of(path, "weight", layer.base_layer, fused, {}) or [whole]):
            a, b = (f"{PREFIX}{part.name.removesuffix('.weight')}.lora_{side}.weight" for side in "AB")
            if a in expected.weights.shapes:  # the adapter may leave out members of a fused layer
                found.append(PlainWeight(a, partial(held_a, layer, i), partial(wanted_a, layer, part)))
                found.append(PlainWeight(b, partial(held_b, layer, i, part), partial(wanted_b, layer, part, scaling)))
    return found


def held_a(layer: Any, i: int) -> Tensor:
    """A of part ``i``: (vLLM's rank, inputs of this rank). Layers that are fused in the trainer too have one A for all parts."""
    stacked: Sequence[Tensor] = layer.lora_a_stacked
    return stacked[i if len(stacked) > 1 else 0][0, 0]


def held_b(layer: Any, i: int, part: Part) -> Tensor:
    """B of part ``i``: (rows of the part, vLLM's rank)."""
    stacked: Sequence[Tensor] = layer.lora_b_stacked
    return stacked[i][0, 0] if len(stacked) > 1 else stacked[0][0, 0].narrow(0, part.row, part.rows)


def wanted_a(layer: Any, part: Part, a: Tensor) -> Tensor:
    """Expected value of held_a, from the trainer's A: sliced if the layer is sharded over its inputs, padded to vLLM's rank."""
    cut = part.of(a) if part.dim == 1 else a
    return F.pad(cut, (0, 0, 0, layer.lora_a_stacked[0].shape[2] - len(a)))


def wanted_b(layer: Any, part: Part, scaling: float, b: Tensor) -> Tensor:
    """Expected value of held_b, from the trainer's B.

    Cast first and then scaled, as vLLM does: in the other order the numbers would round differently.
    """
    stacked = layer.lora_b_stacked[0]
    cut = part.of(b) if part.dim == 0 else b
    return F.pad(cut.to(stacked.dtype) * scaling, (0, stacked.shape[3] - b.shape[1]))
