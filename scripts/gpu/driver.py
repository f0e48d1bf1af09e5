"""GPUs and their memory over time, from the NVIDIA driver, and the processes that a row has started."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType

import psutil

MARK = "TANDEM_GPU_ROW"
"""Environment variable of every process that a row starts."""
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    bytes: int


class Nvml:
    """The driver's management library (NVML), through ctypes: unlike CUDA it creates no context on a GPU.

    Like CUDA it shows only the GPUs that CUDA_VISIBLE_DEVICES lists, by index or UUID: others may use the rest of the machine.
    """

    class _Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    def __init__(self) -> None:
        """Raises OSError without a driver."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count.value))))
        self._handles = []
        for name in filter(None, map(str.strip, visible.split(","))):
            self._handles.append(handle := ctypes.c_void_p())
            if name.isdecimal():
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))

    def gpus(self) -> list[Gpu]:
        found = []
        for handle in self._handles:
            name = ctypes.create_string_buffer(96)
            self._call("nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
            found.append(Gpu(name.value.decode(), self._memory(handle).total))
        return found

    def version(self) -> str:
        text = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode()

    def used(self) -> list[int]:
        """Bytes in use on each GPU."""
        return [self._memory(handle).used for handle in self._handles]

    def _memory(self, handle: ctypes.c_void_p) -> _Memory:
        memory = Nvml._Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._library[name](*arguments):
            raise OSError(f"{name} of libnvidia-ml.so.1 returned {code}")


def nvml() -> Nvml | None:
    """The library; None without a driver or a GPU."""
    try:
        return Nvml()
    except OSError:
        return None


@dataclass
class MemoryWatch:
    """Memory in use on the fullest GPU over time; nothing without a driver. times: seconds since 1970."""

    driver: Nvml | None
    times: list[float] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def __enter__(self) -> MemoryWatch:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self, start: float = 0.0, end: float = float("inf")) -> int | None:
        return max((used for when, used in zip(self.times, self.used, strict=True) if start <= when <= end), default=None)

    def _watch(self) -> None:
        while self.driver is not None and not self._stop.wait(POLL_SECONDS):
            self.used.append(max(self.driver.used()))
            self.times.append(time.time())


def started_by(mark: str) -> list[psutil.Process]:
    """Running processes that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone by now
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(mark: str, seconds: float) -> list[str]:
    """Wait ``seconds`` seconds for the processes to end, kill the rest, and return the command lines of those."""
    deadline = time.monotonic() + seconds
    while (left := started_by(mark)) and time.monotonic() < deadline:
        time.sleep(0.25)
    commands = []
    for process in left:
        with suppress(psutil.Error):
            commands.append(" ".join(process.cmdline())[:120] or process.name())
    while left := started_by(mark):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)
    return commands


def ray_workers(pid: int) -> list[psutil.Process]:
    """Busy workers of the Ray instance that this process started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            title = "".join(process.cmdline()[:1])
            if title.startswith("ray::") and "IDLE" not in title:
                found.append(process)
    return found


@contextmanager
def ended(mark: str) -> Iterator[None]:
    """Kill all processes with the mark at the end of the block."""
    try:
        yield
    finally:
        end_all(mark, 0.0)
