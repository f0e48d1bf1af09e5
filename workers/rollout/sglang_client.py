"""The worker's side of SGLang's own processes: start, call, weights through shared memory, and what is said when they die."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch import Tensor

from workers.controller.session import import_path

T = TypeVar("T")
SHARED = "/dev/shm"
ALIGNMENT = 64  # bytes, of each tensor in a bucket
CLOSE_SECONDS = 10.0
TAIL_LINES, TAIL_BYTES = 20, 8192


class EngineDied(RuntimeError):
    """The engine's own processes ended. Says which, how, and what was written last to where they write."""


class Client:
    """An engine in a process of its own, which ends with this one."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Returns when the engine has started. arguments: of SGLang's ServerArgs. Raises EngineDied."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.rollout.sglang_server", str(os.getpid()), str(theirs.fileno())],
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(import_path())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the controller
            )
        self._connection = Connection(ours.detach())
        self._begun: str | None = None
        self._send(bytes(multiprocessing.current_process().authkey), dict(arguments))
        try:
            self.facts: dict[str, Any] = self._answer("start")
        except BaseException:  # Ctrl-C among them: nobody has it yet who could close it
            self._end()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Raises RuntimeError with the engine's traceback, and EngineDied."""
        self.begin(method, *args)
        return self._finish()

    def begin(self, method: str, *args: Any) -> None:
        """A call for no result, which the next one waits for, and which raises there."""
        self._finish()
        self._send(method, args)
        self._begun = method

    def _finish(self) -> Any:
        method, self._begun = self._begun, None
        return None if method is None else self._answer(method)

    def _send(self, *message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: the answer says so
            self._connection.send(message)

    def _answer(self, method: str) -> Any:
        try:
            done, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait()
            raise EngineDied(
                f"SGLang died in {method}: process {self._process.pid} ended with {status}\n{last_written()}"
            ) from None
        if not done:
            raise RuntimeError(f"SGLang failed in {method}:\n{value}")
        return value

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


def buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Runs of items of at most ``limit`` bytes together; a larger item is a bucket of its own. Reads one item ahead."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


class SharedBucket:
    """Memory that other processes see, for one bucket of weights after the other.

    On CPU it is kept from one sync to the next: to take new pages costs several times what filling them does.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def filled(self, named: Sequence[tuple[str, Tensor]], copies: int) -> list[bytes]:
        """These weights, ``copies`` times: a copy can be opened once."""
        views = self.views(named)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [shared_payload(views) for _ in range(copies)]

    def let_go(self) -> None:
        """Of memory of a GPU, which others need now."""
        if self.device.type == "cuda":
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)

    def room(self, nbytes: int) -> Tensor:
        """uint8 (nbytes,), shared. What was there before is lost. Raises RuntimeError if there is too little."""
        if nbytes > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)  # let go of the old before taking the new
            if self.device.type == "cpu" and (free := shutil.disk_usage(SHARED).free) < nbytes:  # else: killed by SIGBUS
                raise RuntimeError(
                    f"{SHARED} has {free} bytes free, and {nbytes} bytes of weights go to SGLang at once: make it larger, or "
                    "actor_rollout_ref.rollout.update_weights_bucket_megabytes smaller"
                )
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device).share_memory_()
        return self._memory[:nbytes]

    def views(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The weights, cast, in the shared memory. What was there before is lost. Raises RuntimeError if there is too little."""
        sizes = [tensor.numel() * self.dtype.itemsize for _, tensor in named]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        memory = self.room(starts[-1])
        rooms = [memory[start : start + size].view(self.dtype) for start, size in zip(starts, sizes, strict=False)]
        return [(name, room.view(tensor.shape).copy_(tensor)) for (name, tensor), room in zip(named, rooms, strict=True)]


def shared_payload(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """Tensors in shared memory, or on a GPU, for one process that opens them once."""
    return bytes(ForkingPickler.dumps(list(named)))


def last_written() -> str:
    """The last lines of the file that this process and its children write to, if it is one."""
    written = os.fstat(sys.stderr.fileno())
    if not stat.S_ISREG(written.st_mode):
        return ""
    with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as log:
        log.seek(max(0, written.st_size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(["it wrote last:", *lines[-TAIL_LINES:]])
