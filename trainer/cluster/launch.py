"""Start of the workers: on Ray, or in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from configs.schema.common import RayConfig, RunConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.generation import GenerationConfig
from configs.schema.placement import ROLES, Placement
from configs.schema.serve_reward import ServeRewardConfig
from configs.validation.rollout import world_size
from trainer.cluster.determinism import worker_environment
from workers.controller.group import Backend, WorkerGroup
from workers.controller.resource_pool import ResourcePool


def open_backend(trainer: WorkersConfig, ray_kwargs: RayConfig, timeouts: WorkersTimeoutsConfig, run_dir: Path) -> Backend:
    """Backend named by trainer.backend; a context manager that leaves no process behind.

    Raises ValueError if the device is not available.
    """
    if trainer.backend == "local":
        from workers.controller.local_backend import LocalBackend

        check_device(trainer)
        return LocalBackend()
    from workers.controller.ray.ray_backend import RayBackend

    # With several nodes, the slots of all of them are checked when a pool is placed, see ray_places.py.
    if trainer.nnodes == 1:
        check_device(trainer)
    return RayBackend(
        run_dir=run_dir,
        nnodes=trainer.nnodes,
        n_gpus_per_node=trainer.n_gpus_per_node,
        device=trainer.device,
        ray_init=ray_kwargs.ray_init,
        join_seconds=timeouts.join,
    )


def check_device(trainer: WorkersConfig) -> None:
    if trainer.device == "cuda" and torch.cuda.device_count() < trainer.n_gpus_per_node:
        raise ValueError(
            f"trainer.device=cuda trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has "
            f"{torch.cuda.device_count()} CUDA devices; lower trainer.n_gpus_per_node, or set trainer.device=cpu"
        )


def start_workers(
    backend: Backend,
    trainer: WorkersConfig,
    timeouts: WorkersTimeoutsConfig,
    *,
    deterministic: bool = False,
    env: Mapping[str, str] | None = None,
    engine: str | None = None,
) -> WorkerGroup:
    """Start one worker per GPU slot; returns before they are ready, so that the controller can read its data meanwhile.

    engine: rollout engine that they will build.
    """
    pool = ResourcePool(n_per_node=(trainer.n_gpus_per_node,) * trainer.nnodes, device=trainer.device, name="workers")
    what = ("workers.roles.worker:Worker", trainer.device, timeouts.collective)
    return backend.start_group("workers", pool, *what, env=env or {}, deterministic=deterministic, engine=engine)


@contextmanager
def opened_workers(config: GenerationConfig | ServeRewardConfig) -> Iterator[WorkerGroup]:
    """Workers of a program without a run directory; they end with the block. See open_backend and start_workers."""
    directory = Path(config.trainer.default_local_dir)
    with open_backend(config.trainer, config.ray_kwargs, config.timeouts, directory) as backend:
        yield start_workers(backend, config.trainer, config.timeouts)


def start_pools(
    backend: Backend, trainer: RunConfig, place: Placement, timeouts: WorkersTimeoutsConfig, *, engine: str
) -> dict[str, WorkerGroup]:
    """Start the workers of all pools: {role: worker group}, the same group for roles of a pool. Returns before they are ready.

    engine: rollout engine that the pool of the rollout role will build.
    """
    deterministic, env = trainer.deterministic, worker_environment(trainer.deterministic, engine)
    first = place.pools[0]
    # A pool of all GPUs shares them with no other pool, so it needs no room.
    if world_size(first) == world_size(trainer) and first.fraction == 1:
        workers = start_workers(backend, trainer, timeouts, deterministic=deterministic, env=env, engine=engine)
        return dict.fromkeys(ROLES, workers)
    room = ResourcePool(n_per_node=(trainer.n_gpus_per_node,) * trainer.nnodes, device=trainer.device, name="workers")
    groups = {}
    for pool in place.pools:
        slots = ResourcePool(
            n_per_node=(pool.n_gpus_per_node,) * pool.nnodes,
            device=trainer.device,
            name=pool.name,
            room=room,
            first_node=pool.first_node,
            first_slot=pool.first_gpu,
        )
        what = ("workers.roles.worker:Worker", trainer.device, timeouts.collective)
        groups[pool.name] = backend.start_group(
            pool.name,
            slots,
            *what,
            env=env,
            deterministic=deterministic,
            memory_fraction=pool.fraction,
            # Only these workers import the engine: it takes ten seconds for vLLM.
            engine=engine if place.pool("rollout") is pool else None,
        )
    return {role: groups[place.pool(role).name] for role in ROLES}
