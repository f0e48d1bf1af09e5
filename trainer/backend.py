"""Where the workers run: on Ray, or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from configs.schema.common import RayConfig, WorkersConfig, WorkersTimeoutsConfig
from workers.controller.group import Backend, WorkerGroup
from workers.controller.resource_pool import ResourcePool


def open_backend(trainer: WorkersConfig, ray_kwargs: RayConfig, run_dir: Path) -> Backend:
    """The backend that trainer.backend names; a context manager that leaves no process behind.

    Raises ValueError if the device is not there.
    """
    if trainer.backend == "local":
        from workers.controller.local_backend import LocalBackend

        check_device(trainer)
        return LocalBackend()
    from workers.controller.ray_backend import RayBackend

    if trainer.nnodes == 1:
        check_device(trainer)
    return RayBackend(
        run_dir=run_dir,
        nnodes=trainer.nnodes,
        n_gpus_per_node=trainer.n_gpus_per_node,
        device=trainer.device,
        ray_init=ray_kwargs.ray_init,
    )


def check_device(trainer: WorkersConfig) -> None:
    if trainer.device == "cuda" and torch.cuda.device_count() < trainer.n_gpus_per_node:
        raise ValueError(
            f"trainer.device=cuda trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has "
            f"{torch.cuda.device_count()} CUDA devices; lower trainer.n_gpus_per_node, or set trainer.device=cpu"
        )


def start_hosts(
    backend: Backend,
    trainer: WorkersConfig,
    timeouts: WorkersTimeoutsConfig,
    *,
    deterministic: bool = False,
    env: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """One host a GPU slot. Returns before they are ready, so that the controller can read its data meanwhile."""
    pool = ResourcePool(n_per_node=(trainer.n_gpus_per_node,) * trainer.nnodes, device=trainer.device, name="workers")
    what = ("workers.host:Host", trainer.device, timeouts.collective)
    return backend.start_group("workers", pool, *what, env=env or {}, deterministic=deterministic)
