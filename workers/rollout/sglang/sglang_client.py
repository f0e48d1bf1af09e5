"""The worker's side of SGLang's own processes: start, end, and weights through shared memory."""

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
    """An engine in a process of its own, which ends with this one. ranks: the weights of each (sglang_scheduler.Weights)."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Returns when the engine has started. arguments: of SGLang's ServerArgs. Raises EngineDied."""
        ours, theirs = socket.socketpair()
        with Listener(family="AF_UNIX", backlog=arguments["tp_size"]) as listener:  # in a folder that is this process's alone
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "workers.rollout.sglang.sglang_server", str(os.getpid()), str(theirs.fileno())],
                    env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(import_path()), RANKS: str(listener.address)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C is for the controller
                )
            super().__init__(process, Connection(ours.detach()))
            self._send(bytes(multiprocessing.current_process().authkey), dict(arguments))
            try:
                self.facts: dict[str, Any] = self._answer("start")
                self.ranks = [Calls(process, listener.accept()) for _ in range(arguments["tp_size"])]
            except BaseException:  # Ctrl-C among them: nobody has it yet who could close it
                self._end()
                raise

    def begin_on_ranks(self, method: str, *args: Any) -> None:
        """The same on each."""
        for rank in self.ranks:
            rank.begin(method, *args)

    def wait_for_ranks(self, left: int = 0) -> None:
        for rank in self.ranks:
            rank.wait(left)

    def close(self) -> None:
        """Its processes have ended when this returns."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()

    def _end(self) -> None:
        """Now, whatever it does; its children go with it."""
        self._process.kill()
        self._process.wait()


class SharedBucket:
    """Memory that other processes see, for one bucket of weights after the other. number: they know it by that.

    On CPU it is kept from one sync to the next, and stays mapped there: to take new pages, or to map them anew, costs several
    times what filling them does.
    """

    def __init__(self, number: int, device: torch.device, dtype: torch.dtype) -> None:
        self.number, self.device, self.dtype = number, device, dtype
        self._nothing = torch.empty(0, dtype=dtype)
        self._memory = self._nothing
        self._mapped = False

    def handle(self) -> tuple[int, Tensor]:
        """What the others find it by, when it is filled: its number, and the memory, empty if they have it. For all of them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        memory = self._nothing if self._mapped else self._memory
        self._mapped = self.device.type == "cpu"
        return self.number, memory

    def let_go(self) -> None:
        """Of memory of a GPU, which others need now; torch keeps what other processes had open until it is collected."""
        if self.device.type == "cuda":
            self._memory = self._nothing
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def room(self, numel: int) -> Tensor:
        """(numel,) of the bucket's type. What was there before is lost. Raises RuntimeError if there is too little."""
        if numel > len(self._memory):
            self._memory, self._mapped = self._nothing, False  # let go of the old before taking the new
            nbytes = numel * self.dtype.itemsize
            if self.device.type == "cpu" and (free := shutil.disk_usage(SHARED).free) < nbytes:  # else: killed by SIGBUS
                raise RuntimeError(
                    f"{SHARED} has {free} bytes free, and {nbytes} bytes of weights go to SGLang at once: make it larger, or "
                    "actor_rollout_ref.rollout.update_weights_bucket_megabytes smaller"
                )
            self._memory = torch.empty(numel, dtype=self.dtype, device=self.device).share_memory_()
        return self._memory[:numel]

    def views(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The weights, cast, in the shared memory. What was there before is lost. Raises RuntimeError if there is too little."""
        sizes = [tensor.numel() for _, tensor in named]
        places = starts(sizes, ALIGNMENT // self.dtype.itemsize)
        memory = self.room(places[-1])
        rooms = [memory[start : start + size] for start, size in zip(places, sizes, strict=False)]
        return [(name, room.view(tensor.shape).copy_(tensor)) for (name, tensor), room in zip(named, rooms, strict=True)]
