"""The worker's side of SGLang's processes: start, shutdown, and buckets of weights in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
from torch import Tensor

from workers.controller.environment import import_path
from workers.rollout.sglang.sglang_calls import RANKS, Calls
from workers.rollout.sync.buckets import ALIGNMENT, starts

SHARED = "/dev/shm"
CLOSE_SECONDS = 10.0


class Client(Calls):
    """An engine in a child process, which ends with this process.

    facts: SGLang's report of the first rank after start-up. ranks: one connection per rank, to its sglang_scheduler.Weights.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start the engine and wait until it is ready. arguments: of SGLang's ServerArgs. Raises EngineDied."""
        worker_socket, engine_socket = socket.socketpair()
        with Listener(family="AF_UNIX", backlog=arguments["tp_size"]) as listener:  # in a private temporary directory
            # Closes this process's copy after the start: only then does the engine's exit show as end of file.
            with engine_socket:
                process = subprocess.Popen(
                    # -P: no folder of the working directory is imported in place of this package.
                    [
                        *(sys.executable, "-P", "-m", "workers.rollout.sglang.sglang_server"),
                        *(str(os.getpid()), str(engine_socket.fileno())),
                    ],
                    env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(import_path()), RANKS: str(listener.address)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[engine_socket.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal reaches the controller only
                )
            super().__init__(process, Connection(worker_socket.detach()))
            # multiprocessing authenticates processes that open shared tensors by this key: it must be the same on both sides.
            self._send(bytes(multiprocessing.current_process().authkey), dict(arguments))
            try:
                self.facts: dict[str, Any] = self._answer("start")
                # The ranks' threads connected during the start; the backlog of the listener holds their connections until here.
                self.ranks = [Calls(process, listener.accept()) for _ in range(arguments["tp_size"])]
            except BaseException:  # includes KeyboardInterrupt: no caller has this object yet that could close it
                self._end()
                raise

    def begin_on_ranks(self, method: str, *args: Any) -> None:
        """Send a call to each rank."""
        for rank in self.ranks:
            rank.begin(method, *args)

    def wait_for_ranks(self, left: int = 0) -> None:
        """Wait until each rank has at most ``left`` outstanding calls."""
        for rank in self.ranks:
            rank.wait(left)

    def close(self) -> None:
        """Stop the engine; its processes have ended when this returns."""
        self._connection.close()  # the server exits at the end of its calls
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()

    def _end(self) -> None:
        """Kill the engine at once; its children end with it."""
        self._process.kill()
        self._process.wait()


class SharedBucket:
    """Shared memory for one bucket of weights at a time. number: identifies the bucket in the other processes.

    On CPU the memory is kept between syncs and stays mapped in the other processes: allocating or mapping pages costs several
    times as much as filling them. On CUDA it is released after each sync.
    """

    def __init__(self, number: int, device: torch.device, dtype: torch.dtype) -> None:
        self.number, self.device, self.dtype = number, device, dtype
        self._nothing = torch.empty(0, dtype=dtype)
        self._memory = self._nothing
        self._mapped = False

    def handle(self) -> tuple[int, Tensor]:
        """Handle by which other processes open the filled bucket: its number and memory, empty if they have it mapped already.

        Call once per use, and send the result to all processes.
        """
        # Copies on the trainer's stream must be complete: other processes do not wait for it.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        memory = self._nothing if self._mapped else self._memory
        self._mapped = self.device.type == "cpu"
        return self.number, memory

    def release_device_memory(self) -> None:
        """Release GPU memory, which the engine needs now. torch keeps blocks that other processes had open until ipc_collect."""
        if self.device.type == "cuda":
            self._memory = self._nothing
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def room(self, numel: int) -> Tensor:
        """Memory for ``numel`` numbers of the bucket's dtype, (numel,); earlier contents are lost.

        Raises RuntimeError if /dev/shm has too little free space.
        """
        if numel > len(self._memory):
            self._memory, self._mapped = self._nothing, False  # free the old memory before allocating the new
            nbytes = numel * self.dtype.itemsize
            if self.device.type == "cpu" and (free := shutil.disk_usage(SHARED).free) < nbytes:  # else: SIGBUS
                raise RuntimeError(
                    f"{SHARED} has {free} bytes free, and {nbytes} bytes of weights go to SGLang at once: make it larger, or "
                    "actor_rollout_ref.rollout.update_weights_bucket_megabytes smaller"
                )
            self._memory = torch.empty(numel, dtype=self.dtype, device=self.device).share_memory_()
        return self._memory[:numel]

    def views(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy weights into the shared memory, cast to its dtype; returns them as views. Raises RuntimeError as ``room`` does."""
        sizes = [tensor.numel() for _, tensor in named]
        places = starts(sizes, ALIGNMENT // self.dtype.itemsize)
        memory = self.room(places[-1])
        # strict=False: places has one element more than sizes, the total.
        rooms = [memory[start : start + size] for start, size in zip(places, sizes, strict=False)]
        return [(name, room.view(tensor.shape).copy_(tensor)) for (name, tensor), room in zip(named, rooms, strict=True)]
