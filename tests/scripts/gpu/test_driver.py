"""Tests for scripts/gpu/driver.py with a stand-in for the driver's library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from scripts.gpu.driver import Nvml

GPUS = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}


class Library:
    """NVML's calls for three GPUs of 10, 11 and 12 bytes; a handle is the index plus one."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(GPUS)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if index.value in GPUS else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = next((index + 1 for index, name in GPUS.items() if name == uuid.decode()), 0)
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = 9 + (handle.value or 0)
        return 0


@pytest.mark.parametrize(
    ("visible", "used"), [(None, [10, 11, 12]), ("1", [11]), ("2, 0", [12, 10]), ("GPU-c,GPU-a", [12, 10]), ("", [])]
)
def test_only_the_visible_gpus_are_read(monkeypatch: pytest.MonkeyPatch, visible: str | None, used: list[int]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Nvml().used() == used


@pytest.mark.parametrize("visible", ["3", "GPU-d"])
def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(OSError, match="libnvidia-ml"):
        Nvml()
