"""The only worker that is called remotely, one per GPU slot: a device, a process group, and the roles that share them."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from workers.controller.flight_recorder import enable_collective_reports
from workers.controller.group import WorkerInfo
from workers.determinism import deterministic_kernels
from workers.engine.base import EngineSpec, LossSpec
from workers.engine.saving import hashes_of
from workers.roles.memory_scheduler import GCTime, MemoryScheduler, ResidentModel
from workers.roles.model_role import ModelRole
from workers.roles.rollout_engines import import_engine, make_rollout
from workers.roles.rollout_role import RolloutRole
from workers.roles.train_engines import make_engine
from workers.rollout.base import RolloutSpec
from workers.rollout.malloc_trim import keep_freed_memory
from workers.rollout.sync.channel import Channel, Receiver, Rendezvous, Sender
from workers.rollout.sync.weight_sync import WeightSource, WeightSync
from workers.start_times import START


class Worker:
    """Worker process of a pool; holds this rank's part of every role of the pool.

    The controller calls its methods by ``rpc.worker_call``, and those of ``roles`` by ``rpc.role_call``.
    """

    def __init__(
        self,
        info: WorkerInfo,
        device: Literal["cpu", "cuda"],
        collective_seconds: float,
        *,
        deterministic: bool = False,
        memory_fraction: float = 1.0,
        engine: str | None = None,
    ) -> None:
        """Join the process group of the pool's workers: gloo on CPU, gloo and NCCL on CUDA.

        collective_seconds: how long a rank waits in a collective for the others. deterministic: see deterministic_kernels.
        memory_fraction: largest share of the device's memory for torch's allocator; other processes have the rest. engine:
        the rollout engine that will be built; its package is imported now, while the controller reads its data.
        """
        self.info = info
        self.device = device
        self._opened = ExitStack()
        self._nondeterministic = self._opened.enter_context(deterministic_kernels()) if deterministic else set()
        self.memory_scheduler = MemoryScheduler(device)
        self.roles: dict[str, ModelRole | RolloutRole] = {}
        self._gc_time = GCTime()
        self._opened.callback(self._gc_time.close)
        if device == "cuda":
            torch.cuda.set_device(info.local_rank)
            if memory_fraction < 1.0:
                torch.cuda.set_per_process_memory_fraction(memory_fraction)
        else:
            # torch's default is every core, in each worker of the machine.
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            keep_freed_memory()
        # gloo would take the interface of the host's name, which is 127.0.1.1 on Debian: other nodes could not reach it.
        if (interface := interface_to(info.master_addr)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._limit = limit = timedelta(seconds=collective_seconds)
        # Before the process group is created: the flight recorder reads its size once.
        enable_collective_reports()
        with START("process group"):
            dist.init_process_group(
                # gloo in addition to NCCL: collectives of CPU tensors and objects take no device memory.
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=rendezvous_store(info, limit),
                rank=info.rank,
                world_size=info.world_size,
                timeout=limit,
            )
        if engine is not None:
            with START("engine imports"):
                import_engine(engine, device)
        START.ready = time.time()

    def build_model(self, role: str, spec: EngineSpec, loss: LossSpec | None) -> tuple[int, bool]:
        """Build a model role. Returns (data-parallel shard of this rank, whether it returns the results of that shard)."""
        with START(role):
            engine = make_engine(spec)
        self.roles[role] = ModelRole(role, engine, loss, self.memory_scheduler)
        self.memory_scheduler.add_model(role, ResidentModel(engine, spec.sharding.param_offload, spec.sharding.optimizer_offload))
        return engine.mesh.dp_rank, engine.mesh.is_output_rank

    def build_rollout(self, role: str, spec: RolloutSpec, source: str) -> tuple[int, bool]:
        """Build the rollout role with the weights of the model role ``source``. Returns as build_model does.

        Consecutive ranks form one engine, however the model is sharded, and the first of them returns the results.
        """
        return self._add_rollout(role, spec, self._model(source).engine, source)

    def build_rollout_apart(self, role: str, spec: RolloutSpec, meeting: Rendezvous) -> tuple[int, bool]:
        """Build the rollout role with weights from other processes. Without a model in this process it does not sleep."""
        spec = replace(spec, rollout=replace(spec.rollout, free_cache_engine=False))
        channel = Channel.joined(meeting, self.info.rank, self.device, self._limit)
        half = spec.rollout.update_weights_bucket_megabytes * 2**20 // 2  # the engine holds another bucket at the same time
        receiver = Receiver(channel, meeting.adapter, half)
        return self._add_rollout(role, spec, receiver, None, receiver.sync)

    def _add_rollout(
        self,
        role: str,
        spec: RolloutSpec,
        weights: WeightSource,
        source: str | None,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[int, bool]:
        self.memory_scheduler.release_cached_memory()  # an engine sizes itself by the free memory
        with START(role):
            rollout = make_rollout(spec, self.info)
        self.memory_scheduler.add_rollout(rollout, free_cache_engine=spec.rollout.free_cache_engine)
        sync = WeightSync(rollout, weights, spec.rollout, self.info.rank)
        replica, rank_in_it = divmod(self.info.rank, rollout.tensor_parallel_size)
        tokenizer = None if rank_in_it else spec.tokenizer  # the results of the other ranks are not used
        self.roles[role] = RolloutRole(rollout, source, self.memory_scheduler, sync, during, self._gc_time, tokenizer)
        return replica, rank_in_it == 0

    def offer_weights(self, role: str, receivers: int, replica: int = 0) -> Rendezvous | None:
        """Let send_weights of this model role serve rollout engines in other processes. receivers: number of their ranks.

        replica: number of their channel; a channel that it had before is abandoned. Returns on rank 0 where they connect, on
        other ranks None.
        """
        model = self._model(role)
        # One sender for all channels: gathering the weights is collective over the trainer, however many replicas want them.
        model.sender = model.sender or Sender(model.engine)
        if self.info.rank != 0:
            return None
        channel, port = Channel.offered(self.info.master_addr, receivers, self.device, self._limit)
        model.sender.connect(replica, channel)
        return Rendezvous(self.info.master_addr, port, receivers, model.engine.adapter_config)

    def _model(self, role: str) -> ModelRole:
        model = self.roles[role]
        assert isinstance(model, ModelRole)
        return model

    def hash_files(self, directory: Path, names: Sequence[str]) -> dict[str, str]:
        """{name: sha256} of this rank's part of the files: consecutive ones, as many as on any other rank or one fewer."""
        start, end = (len(names) * rank // self.info.world_size for rank in (self.info.rank, self.info.rank + 1))
        return hashes_of(directory, names[start:end])

    def is_alive(self) -> None:
        """Answer a call: the process lives."""

    def start_times(self) -> tuple[float, dict[str, float]]:
        """See StartTimes.take."""
        return START.take()

    def nondeterministic_kernels(self) -> list[str]:
        """Kernels that have run so far and may not be bitwise reproducible; recorded only with deterministic."""
        return sorted(self._nondeterministic)

    def memory(self) -> int:
        """Bytes in use. CPU: resident, of this process and its descendants. CUDA: on this rank's device, by all processes."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total - free
        process = psutil.Process()
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))

    def close(self) -> None:
        """Leave the process group, so that the next worker in this process can join one."""
        # First: an engine that closes collects its reference cycles, which hold its memory.
        if self.memory_scheduler.frozen:
            gc.unfreeze()
        for role in self.roles.values():
            if isinstance(role, RolloutRole):
                role.rollout.close()
        # The process continues: drop every reference to the models, also the scheduler's, and free reference cycles.
        self.roles.clear()
        self.memory_scheduler = MemoryScheduler(self.device)
        gc.collect()
        dist.destroy_process_group()
        self._opened.close()


def interface_to(address: str) -> str | None:
    """Network interface through which this machine reaches ``address``; None if none has the source address."""
    # Any port: connecting a UDP socket sends nothing.
    family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.connect(target)
        source = trial.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if source in {one.address.split("%")[0] for one in found}]
    return names[0] if names else None


def rendezvous_store(info: WorkerInfo, limit: timedelta) -> dist.Store:
    """Store through which the ranks find each other. Rank 0 listens on its own address; torch alone would on every interface."""
    listener = None
    if info.rank == 0:
        listener = socket.create_server((info.master_addr, info.master_port)).detach()
    return dist.TCPStore(
        info.master_addr,
        info.master_port,
        info.world_size,
        is_master=info.rank == 0,
        timeout=limit,
        master_listen_fd=listener,
    )
