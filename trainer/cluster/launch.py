"""Start of the workers: on Ray, or in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from configs.schema.common import RayConfig, RunConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.generation import GenerationConfig
from configs.schema.placement import ROLES, Placement, Pool
from configs.schema.serve import ServeConfig
from configs.schema.serve_reward import ServeRewardConfig
from configs.validation.rollout import world_size
from trainer.cluster.determinism import worker_environment
from workers.controller.group import Backend, WorkerError, WorkerGroup
from workers.controller.logs import announce
from workers.controller.resource_pool import ResourcePool

MOST_PER_CORE = 8
"""Workers of a CPU core: 64 on two cores were not there after 100 s."""
Replacement = Callable[[str, WorkerError], AbstractContextManager[None]]


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
    """Check that this machine has the GPUs, and report more workers than cores. Raises ValueError."""
    cores = len(os.sched_getaffinity(0))
    if trainer.device == "cpu" and trainer.n_gpus_per_node > cores:
        workers = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: a worker per core is fastest on a CPU"
        announce([f"{workers}, and this process may use {cores}"])
    if trainer.device == "cpu" and trainer.n_gpus_per_node > MOST_PER_CORE * cores:
        raise ValueError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {cores} cores do not start that many workers; use "
            f"{MOST_PER_CORE * cores} at most, a worker per core is fastest"
        )
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
def opened_workers(config: GenerationConfig | ServeConfig | ServeRewardConfig) -> Iterator[WorkerGroup]:
    """Workers of a program without a run directory; they end with the block. See open_backend and start_workers."""
    directory = Path(config.trainer.default_local_dir)
    with open_backend(config.trainer, config.ray_kwargs, config.timeouts, directory) as backend:
        yield start_workers(backend, config.trainer, config.timeouts)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Worker groups of a rollout pool without other roles: one for each replica of the engine, so that it can be replaced.

    starts: start of each group. replacement: see RunLifecycle.replacement.
    """

    groups: list[WorkerGroup]
    starts: Sequence[Callable[[], WorkerGroup]]
    replacement: Replacement

    @contextmanager
    def replaced(self, replica: int, death: WorkerError) -> Iterator[None]:
        """End what is left of a replica's workers, and start others on the same slots; they are not ready yet.

        The replacement is recorded after the block. Raises ``death`` if there may be none.
        """
        with self.replacement(f"replica {replica} of rollout", death):
            # First: what is left of its workers holds the slots.
            self.groups[replica].shutdown()
            self.groups[replica] = self.starts[replica]()
            yield


@dataclass(frozen=True, slots=True)
class RunWorkers:
    """Workers of a run. of_role: the group of each role, the same for roles of a pool. replicas: those of the rollout role, which
    then is not in ``of_role``; None: it shares a pool with other roles.
    """

    of_role: Mapping[str, WorkerGroup]
    replicas: Replicas | None

    def groups(self) -> list[WorkerGroup]:
        """Every group once, with the present group of each replica."""
        return list(dict.fromkeys([*self.of_role.values(), *(self.replicas.groups if self.replicas is not None else ())]))


def start_pools(
    backend: Backend,
    trainer: RunConfig,
    place: Placement,
    timeouts: WorkersTimeoutsConfig,
    *,
    engine: str,
    engine_ranks: int,
    replacement: Replacement,
) -> RunWorkers:
    """Start the workers of all pools; returns before they are ready.

    engine: rollout engine that the pool of the rollout role will build. engine_ranks: workers of a replica of it. replacement:
    see Replicas.
    """
    deterministic, env = trainer.deterministic, worker_environment(trainer.deterministic, engine)
    first = place.pools[0]
    # A pool of all GPUs shares them with no other pool, so it needs no room.
    if world_size(first) == world_size(trainer) and first.fraction == 1:
        workers = start_workers(backend, trainer, timeouts, deterministic=deterministic, env=env, engine=engine)
        return RunWorkers(dict.fromkeys(ROLES, workers), None)
    room = ResourcePool(n_per_node=(trainer.n_gpus_per_node,) * trainer.nnodes, device=trainer.device, name="workers")

    def start(pool: Pool, slots: ResourcePool) -> WorkerGroup:
        return backend.start_group(
            slots.name,
            slots,
            "workers.roles.worker:Worker",
            trainer.device,
            timeouts.collective,
            env=env,
            deterministic=deterministic,
            memory_fraction=pool.fraction,
            # Only these workers import the engine: it takes ten seconds for vLLM.
            engine=engine if place.pool("rollout") is pool else None,
        )

    groups, replicas = dict[str, WorkerGroup](), None
    for pool in place.pools:
        slots = ResourcePool(
            n_per_node=(pool.n_gpus_per_node,) * pool.nnodes,
            device=trainer.device,
            name=pool.name,
            room=room,
            first_node=pool.first_node,
            first_slot=pool.first_gpu,
        )
        if pool.roles == ("rollout",):
            starts = [partial(start, pool, part) for part in slots.parts(engine_ranks)]
            replicas = Replicas([start_one() for start_one in starts], starts, replacement)
        else:
            groups[pool.name] = start(pool, slots)
    return RunWorkers({role: groups[name] for role in ROLES if (name := place.pool(role).name) in groups}, replicas)
