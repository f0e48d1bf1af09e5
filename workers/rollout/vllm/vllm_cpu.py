"""vLLM on CPU: arguments, environment, a worker that can sleep, and verification of packed weights. Not loaded on CUDA.

Problem: on CPU vLLM computes linear layers with packed copies of their weights, which cannot be read back, and its worker has no
sleep mode. Idea for verification: probe a layer with inputs that are zero except for a few neighbours. One non-zero input returns
one column of weights exactly (verify_weights=full); four neighbours with the factors MULTIPLIERS return a weighted sum of four
columns for the cost of one (sample), compared within the bounds of rounding. Experts of a mixture are packed by moving
numbers only: the trainer's rows are packed in the same way and compared bitwise.
"""

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

from configs.base.keys import ConfigError
from workers.controller.group import WorkerInfo
from workers.engine.hf.hf_model import DTYPES
from workers.rollout.base import EngineAsleep, RolloutSpec
from workers.rollout.cached_attention import CACHED_ATTENTION, probe_cache_shape
from workers.rollout.kv_cache import round_up
from workers.rollout.malloc_trim import trim_free_memory
from workers.rollout.verification import HeldWeight, cost_of_reading
from workers.rollout.vllm.rng import fenced
from workers.rollout.vllm.vllm_weights import Part
from workers.rollout.vllm_times import TimedStart

BLOCK = 128  # tokens per block of vLLM's KV cache on CPU
PACK = 32  # rows of an expert's weight that are packed together


def set_environment() -> None:
    """Set vLLM's environment variables: threads are not bound to cores, and the cache size comes from the arguments."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


@contextmanager
def fenced_uncompiled() -> Iterator[None]:
    """``fenced`` without compilation: the one function that vLLM's sampler compiles takes 40 s, without a gain on CPU."""
    with fenced(), torch.compiler.set_stance("force_eager"):
        yield


def completed(arguments: dict[str, Any], spec: RolloutSpec, model: PreTrainedModel, place: WorkerInfo) -> dict[str, Any]:
    """Complete EngineArgs with the worker below, and a KV cache for all sequences within gpu_memory_utilization of the memory."""
    share = int(psutil.virtual_memory().total * spec.rollout.gpu_memory_utilization) // (place.n_groups * place.world_size)
    cache = {"kv_cache_memory_bytes": min(share, cache_bytes(spec, model)), "block_size": BLOCK}
    worker = f"{SleepingWorker.__module__}.{SleepingWorker.__qualname__}"
    return cache | arguments | {"worker_cls": worker, "enforce_eager": True}  # compiling the model takes minutes


def cache_bytes(spec: RolloutSpec, model: PreTrainedModel) -> int:
    """Bytes of keys and values on one rank, for max_num_seqs sequences of full length. model: on the meta device.

    Raises ValueError for a head size that vLLM's attention on CPU does not support.
    """
    model.set_attn_implementation(CACHED_ATTENTION)
    shape = probe_cache_shape(model)
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if shape.key_dim not in sizes:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: on CPU vLLM has attention for heads of {', '.join(map(str, sizes))} numbers; "
            f"{spec.model.path} has {shape.key_dim}"
        )
    size = spec.rollout.tensor_model_parallel_size
    numbers = shape.layers * max(1, shape.kv_heads // size) * (shape.key_dim + shape.value_dim)
    tokens = spec.rollout.max_num_seqs * round_up(spec.max_model_len, BLOCK) + BLOCK  # vLLM reserves one block for itself
    return tokens * numbers * DTYPES[spec.rollout.dtype].itemsize


class SleepingWorker(TimedStart, CPUWorker):
    """vLLM's CPU worker with a sleep mode: tensors are dropped on sleep and allocated again on wake-up.

    Linear layers keep a packed copy of their weight in the closure ``cpu_linear``; loading weights packs them again.
    """

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, distributed_init_method: str, is_driver_worker: bool = False
    ) -> None:
        """See CPUWorker; distributed_init_method is replaced."""
        # vLLM names shared memory after the part of the address that follows the last colon: the port keeps jobs apart.
        address = f"env://:{os.environ['MASTER_PORT']}"
        super().__init__(vllm_config, local_rank, rank, address, is_driver_worker=is_driver_worker)
        self._asleep: dict[nn.Parameter, torch.Tensor] = {}
        """{dropped parameter: meta tensor with its shape and dtype}."""

    def load_model(self, **kwargs: Any) -> None:
        """Raises ValueError for a mixture of experts with an adapter: vLLM then selects kernels that do not exist on CPU."""
        super().load_model(**kwargs)
        if self.vllm_config.lora_config is not None:
            from workers.rollout.vllm.vllm_lora import for_every_token

            if is_moe_model(self.model_runner.model):
                raise ConfigError(
                    "actor_rollout_ref.rollout.lora_sync=adapter: on CPU vLLM has no adapters for a mixture of experts; "
                    "set lora_sync=merged"
                )
            for_every_token(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache, and with level 2 also the weights.

        Level 1 keeps the weights: on CUDA vLLM moves them to host memory, where they are here anyway.
        """
        runner = self.model_runner
        clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
        runner.kv_caches.clear()
        if level == 2:
            self._drop_packed()
            if not self._asleep:
                for parameter in runner.model.parameters():
                    self._asleep[parameter] = torch.empty_like(parameter, device="meta")
                    parameter.data = torch.empty(0, dtype=parameter.dtype)  # empty: any use of it fails
        trim_free_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory of ``tags``. Weights are undefined until they are loaded."""
        assert tags is not None
        if "weights" in tags:
            for parameter, like in self._asleep.items():
                parameter.data = torch.empty_like(like, device="cpu")
            self._asleep.clear()
        if "kv_cache" in tags:
            runner = self.model_runner
            runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)

    def _drop_packed(self) -> None:
        """Release the packed copies. A layer that is called before its weights are loaded raises EngineAsleep."""
        for module in packed_layers(self.model_runner.model):
            module.cpu_linear = asleep

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights, and pack the layers that vLLM would miss."""
        # The old packed copies are released first, so that no layer is in memory twice.
        self._drop_packed()
        # vLLM 0.32 packs experts only when it builds their kernel: without a kernel it builds, and packs, again.
        for module in self.model_runner.model.modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
        super().reload_weights(*args, **kwargs)
        # vLLM packs a layer when a weight arrives under the layer's own name. The weight of a tied head arrives under the name of
        # the embedding: layers that share a parameter are packed here.
        names: dict[nn.Parameter, int] = {}
        layers = packed_layers(self.model_runner.model)
        for layer in layers:
            names[layer.weight] = names.get(layer.weight, 0) + 1
        for layer in layers:
            if names[layer.weight] > 1:
                layer.quant_method.process_weights_after_loading(layer)


MULTIPLIERS = (1.0, -1.0, 2.0, -2.0)  # all different, so that exchanged columns change the sum


class PackedWeight(HeldWeight):
    """A linear layer whose packed weight cannot be read: verified by its outputs for probe inputs.

    A line is one probe: an input of zeros except for ``fold`` neighbours, which are ``MULTIPLIERS``. The output is the weighted
    sum of ``fold`` columns of the weight, for all rows of the layer at once. With fold 1 (exact) it is the column itself,
    bitwise.
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
        """Expected outputs (stop - start, rows of the part), and the bound on rounding errors.

        The bound covers rounding of the result to the layer's dtype, and of both sums in float32. The terms of a sum are at most
        the largest weight that is read of its row, times MULTIPLIERS.
        """
        inputs = self._parts[part].of(tensor.detach())[:, start * self._fold : stop * self._fold].to(self._dtype)
        if self._fold == 1:
            # One non-zero product per sum: no rounding. Only subnormal float32 numbers are within the tolerance.
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
        """Probe inputs of lines [start, stop): (stop - start, inputs)."""
        # Probe i is non-zero at inputs [(start + i) * fold, (start + i + 1) * fold): one strided diagonal per multiplier.
        probes = torch.zeros(stop - start, self.lines * self._fold, dtype=self._dtype)
        for i in range(self._fold):
            probes[:, start * self._fold + i :: self._fold].fill_diagonal_(MULTIPLIERS[i])
        return probes[:, : self._inputs]


class PackedExpert(HeldWeight):
    """Rows of one expert's weight in vLLM's packed layout. A line is PACK rows, which are contiguous in memory.

    Expected values are packed by vLLM's own function, which reorders numbers without changing them.
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
        """Expected values (stop - start, PACK * columns), zeros where vLLM pads the trainer's rows or columns."""
        rows = self._part.of(tensor.detach())[start * PACK : stop * PACK].to(self._dtype)
        missing = (stop - start) * PACK - len(rows)
        rows = nn.functional.pad(rows, (0, self._columns - rows.shape[1], 0, missing))
        return cpu_prepack_moe_weight(rows[None].contiguous(), self._isa).view(stop - start, -1), 0.0

    def read(self, start: int, stop: int) -> list[torch.Tensor]:
        packed = self._experts.get_parameter(self._leaf)[self._part.expert].view(-1, PACK * self._columns)
        first = self._part.row // PACK
        return [packed[first + start : first + stop]]


def packed_weight(layer: nn.Module, leaf: str, parts: Sequence[Part], *, exact: bool) -> list[HeldWeight]:
    """Held weights of a layer that computes with a packed copy; [] if it computes with the parameter itself.

    An embedding has a packed copy too, for a head that is tied to it, but looks up rows of its parameter.
    """
    if isinstance(layer, RoutedExperts):
        return [PackedExpert(layer, leaf, part) for part in parts]
    is_linear = isinstance(layer, LinearBase | ParallelLMHead) and leaf == "weight"
    return [PackedWeight(layer, parts, exact=exact)] if is_linear and "cpu_linear" in vars(layer) else []


def packed_layers(model: nn.Module) -> list[Any]:
    """All modules with a packed copy."""
    return [module for module in model.modules() if "cpu_linear" in vars(module)]


def asleep(*args: Any) -> torch.Tensor:
    """Stands in for cpu_linear while there are no weights."""
    raise EngineAsleep("vLLM's weights are asleep")
