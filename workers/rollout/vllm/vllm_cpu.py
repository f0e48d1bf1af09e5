"""What vLLM needs on CPU alone: arguments, environment, and a worker that can sleep. Not loaded on CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.compiler
from torch import nn
from transformers import PreTrainedModel
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.lora.utils import is_moe_model
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import clear_layer_kv_caches

from workers.controller.group import WorkerInfo
from workers.engine.hf.hf_model import DTYPES
from workers.rollout.base import EngineAsleep, RolloutSpec
from workers.rollout.cached_attention import CACHED_ATTENTION, probe_cache_shape
from workers.rollout.kv_cache import round_up
from workers.rollout.malloc_trim import give_back_free_memory
from workers.rollout.verification import HeldWeight, cost_of_reading
from workers.rollout.vllm.rng import fenced
from workers.rollout.vllm.vllm_weights import Part
from workers.rollout.vllm_times import TimedStart

BLOCK = 128  # tokens of a block of vLLM's cache on CPU
PACK = 32  # rows of an expert that are packed together


def set_environment() -> None:
    """vLLM binds no thread to a core, and the size of its cache is an argument."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


@contextmanager
def fenced_uncompiled() -> Iterator[None]:
    """As fenced. And nothing is compiled: the one function that vLLM's sampler has compiled takes 40 s, for no gain on CPU."""
    with fenced(), torch.compiler.set_stance("force_eager"):
        yield


def completed(arguments: dict[str, Any], spec: RolloutSpec, model: PreTrainedModel, place: WorkerInfo) -> dict[str, Any]:
    """Arguments of EngineArgs with the worker below, and a cache for all sequences at once, within gpu_memory_utilization."""
    share = int(psutil.virtual_memory().total * spec.rollout.gpu_memory_utilization) // place.world_size
    cache = {"kv_cache_memory_bytes": min(share, cache_bytes(spec, model)), "block_size": BLOCK}
    worker = f"{SleepingWorker.__module__}.{SleepingWorker.__qualname__}"
    return cache | arguments | {"worker_cls": worker, "enforce_eager": True}  # compiling the model takes minutes


def cache_bytes(spec: RolloutSpec, model: PreTrainedModel) -> int:
    """Of keys and values on one rank, with max_num_seqs sequences of full length. model: on the meta device.

    Raises ValueError for heads of a size that vLLM's attention on CPU has not.
    """
    model.set_attn_implementation(CACHED_ATTENTION)
    shape = probe_cache_shape(model)
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if shape.key_dim not in sizes:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm: on CPU vLLM has attention for heads of {', '.join(map(str, sizes))} numbers; "
            f"{spec.model.path} has {shape.key_dim}"
        )
    size = spec.rollout.tensor_model_parallel_size
    numbers = shape.layers * max(1, shape.kv_heads // size) * (shape.key_dim + shape.value_dim)
    tokens = spec.rollout.max_num_seqs * round_up(spec.max_model_len, BLOCK) + BLOCK  # vLLM keeps a block for itself
    return tokens * numbers * DTYPES[spec.rollout.dtype].itemsize


class SleepingWorker(TimedStart, CPUWorker):
    """vLLM's worker, which drops its tensors when it sleeps and makes them anew when it wakes.

    Linear layers keep their weights in packed copies, behind a function ``cpu_linear``; loading weights packs them.
    """

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, distributed_init_method: str, is_driver_worker: bool = False
    ) -> None:
        """vLLM makes names of shared memory from what follows the last colon of the address: our port keeps jobs apart."""
        address = f"env://:{os.environ['MASTER_PORT']}"
        super().__init__(vllm_config, local_rank, rank, address, is_driver_worker=is_driver_worker)
        self._asleep: dict[nn.Parameter, torch.Tensor] = {}
        """Parameters without their numbers: what they are like, on the meta device."""

    def load_model(self, **kwargs: Any) -> None:
        """Raises ValueError for a mixture of experts beside an adapter: there vLLM takes kernels that CPUs have not."""
        super().load_model(**kwargs)
        if self.vllm_config.lora_config is not None:
            from workers.rollout.vllm.vllm_lora import for_every_token

            if is_moe_model(self.model_runner.model):
                raise ValueError(
                    "actor_rollout_ref.rollout.lora_sync=adapter: on CPU vLLM has no adapters beside a mixture of experts; "
                    "set lora_sync=merged"
                )
            for_every_token(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights. vLLM moves them to the host's memory then, where they are here anyway."""
        runner = self.model_runner
        clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
        runner.kv_caches.clear()
        if level == 2:
            self._drop_packed()
            if not self._asleep:
                for parameter in runner.model.parameters():
                    self._asleep[parameter] = torch.empty_like(parameter, device="meta")
                    parameter.data = torch.empty(0, dtype=parameter.dtype)  # whoever reads it gets an error
        give_back_free_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        assert tags is not None
        if "weights" in tags:
            for parameter, like in self._asleep.items():
                parameter.data = torch.empty_like(like, device="cpu")
            self._asleep.clear()
        if "kv_cache" in tags:
            runner = self.model_runner
            runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)

    def _drop_packed(self) -> None:
        for module in packed_layers(self.model_runner.model):
            module.cpu_linear = asleep

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM packs a layer once its own weights have come; those of a tied head come under another name.

        The old packed copies go first, so that no layer is there twice. Experts it packs when it makes their kernel, and then no
        more (vLLM 0.32): the kernel is made anew.
        """
        self._drop_packed()
        for module in self.model_runner.model.modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
        super().reload_weights(*args, **kwargs)
        names: dict[nn.Parameter, int] = {}
        layers = packed_layers(self.model_runner.model)
        for layer in layers:
            names[layer.weight] = names.get(layer.weight, 0) + 1
        for layer in layers:
            if names[layer.weight] > 1:
                layer.quant_method.process_weights_after_loading(layer)


MULTIPLIERS = (1.0, -1.0, 2.0, -2.0)  # each another, so that inputs that are exchanged show


class PackedWeight(HeldWeight):
    """A linear layer whose weight is a packed copy: nobody can read it, but what comes out for a probe is known.

    A line is one probe, an input of zeros but for ``fold`` neighbours, which are ``MULTIPLIERS``: out come sums of as many
    weights, for all rows of the layer at once. With fold 1 each weight comes out by itself, exactly.
    """

    computed = True

    def __init__(self, layer: Any, parts: Sequence[Part], *, exact: bool) -> None:
        self.names = tuple(part.name for part in parts)
        self._layer, self._parts = layer, parts
        self._fold = 1 if exact else len(MULTIPLIERS)
        self._inputs: int = layer.input_size if isinstance(layer, ReplicatedLinear) else layer.input_size_per_partition
        self._dtype: torch.dtype = layer.params_dtype
        self.lines = -(-self._inputs // self._fold)
        self.line_bytes = self._fold * sum(part.rows for part in parts) * self._dtype.itemsize
        self.cost = self._inputs * sum(part.rows for part in parts)

    def expected(self, part: int, tensor: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(stop - start, rows of the part), and the bound of rounding: of the result, and of both sums in float32.

        The terms of a sum are at most the largest number that is read of its row, times MULTIPLIERS.
        """
        inputs = self._parts[part].of(tensor.detach())[:, start * self._fold : stop * self._fold].to(self._dtype)
        if self._fold == 1:
            return inputs.T.clone(), torch.tensor(torch.finfo(torch.float32).tiny)
        missing = (stop - start) * self._fold - inputs.shape[1]
        wide = nn.functional.pad(inputs.float(), (0, missing))
        multipliers = torch.tensor(MULTIPLIERS)
        want = (wide.view(-1, self._fold) @ multipliers).view(len(wide), -1).T
        size = wide.abs_().amax(1) * multipliers.abs().sum()
        eps, eps32 = torch.finfo(self._dtype).eps, torch.finfo(torch.float32).eps
        return want, want.abs() * (eps / 2) + size * (eps32 * self._fold)

    def read(self, start: int, stop: int) -> list[torch.Tensor]:
        out = self._layer.quant_method.apply(self._layer, self._probes(start, stop), None)
        return [out[:, part.row : part.row + part.rows] for part in self._parts]

    def _probes(self, start: int, stop: int) -> torch.Tensor:
        """(stop - start, inputs)"""
        probes = torch.zeros(stop - start, self.lines * self._fold, dtype=self._dtype)
        for i in range(self._fold):
            probes[:, start * self._fold + i :: self._fold].fill_diagonal_(MULTIPLIERS[i])
        return probes[:, : self._inputs]


class PackedExpert(HeldWeight):
    """Rows of one expert's weight, which lie in memory in an order of vLLM's own, PACK rows at a time, each such line in one
    piece.

    What they must be is packed by vLLM's own function, which moves numbers and changes none.
    """

    def __init__(self, experts: Any, leaf: str, part: Part) -> None:
        self.names = (part.name,)
        self._experts, self._leaf, self._part = experts, leaf, part
        self._isa: str = experts.quant_method.moe_kernel.fused_experts.isa
        held = experts.get_parameter(leaf)
        self._columns, self._dtype = held.shape[2], held.dtype
        self.lines = -(-part.rows // PACK)
        self.line_bytes = PACK * self._columns * held.itemsize
        self.cost = cost_of_reading(self.line_bytes, self.lines)

    def expected(self, part: int, tensor: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, float]:
        """(stop - start, PACK * columns), zeros where vLLM has more rows or columns than the trainer."""
        rows = self._part.of(tensor.detach())[start * PACK : stop * PACK].to(self._dtype)
        missing = (stop - start) * PACK - len(rows)
        rows = nn.functional.pad(rows, (0, self._columns - rows.shape[1], 0, missing))
        return cpu_prepack_moe_weight(rows[None].contiguous(), self._isa).view(stop - start, -1), 0.0

    def read(self, start: int, stop: int) -> list[torch.Tensor]:
        packed = self._experts.get_parameter(self._leaf)[self._part.expert].view(-1, PACK * self._columns)
        first = self._part.row // PACK
        return [packed[first + start : first + stop]]


def packed_weight(layer: nn.Module, leaf: str, parts: Sequence[Part], *, exact: bool) -> list[HeldWeight]:
    """An embedding has a packed copy too, for a head that is tied to it, but looks up its parameter."""
    if isinstance(layer, RoutedExperts):
        return [PackedExpert(layer, leaf, part) for part in parts]
    is_linear = isinstance(layer, LinearBase | ParallelLMHead) and leaf == "weight"
    return [PackedWeight(layer, parts, exact=exact)] if is_linear and "cpu_linear" in vars(layer) else []


def packed_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if "cpu_linear" in vars(module)]


def asleep(*args: Any) -> torch.Tensor:
    raise EngineAsleep("vLLM's weights are asleep")
