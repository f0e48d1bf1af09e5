"""Sizes of a new task's recipe for the machine that it is written on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """gpus: their number. gpu_memory: of the smallest, in bytes. has_bfloat16: all of them compute in it."""

    gpus: int = 0
    gpu_memory: float = 0.0
    has_bfloat16: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "a CPU"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_memory / GB:.0f} GB"


def this_machine() -> LocalMachine:
    import torch  # imported late: it takes seconds

    if not torch.cuda.is_available():
        return LocalMachine()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return LocalMachine(len(gpus), min(gpu.total_memory for gpu in gpus), all(gpu.major >= 8 for gpu in gpus))


def sizes(machine: LocalMachine, defaults: Mapping[str, Mapping[str, Any]], template: str) -> dict[str, Any]:
    """Values for the files of a task. defaults: data_preprocess/new_task/sizes.yaml."""
    kind = "gpu" if machine.gpus else "cpu"
    values = {**defaults[kind], **defaults.get(f"{kind}_{template}", {}), "gpus": max(machine.gpus, 1), "machine": str(machine)}
    if not machine.gpus:
        return values
    if machine.gpu_memory > 40 * GB:
        values["model"] = values["model"].replace("0.5B", "1.5B")
    if machine.gpu_memory < 22 * GB:
        # Without offload, 0.5B has 8 GB of parameters, gradients and optimizer state next to the engine.
        values |= {"offload": True, "tokens": values["tokens"] // 4}
    if not machine.has_bfloat16:
        values["dtype"] = "float32"
    return values
