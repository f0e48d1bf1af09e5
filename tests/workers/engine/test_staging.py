"""Copies in host memory: the same bytes, the memory given back, and room for them on every host."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine import staging
from workers.engine.staging import copied, shortage
from workers.host_buffers import ALIGNED
from workers.host_memory import Memory

MB = 10**6


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_copies_are_the_same_bytes_and_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several pieces, of every type and shape, and such as are not in one piece."""
    monkeypatch.setattr(staging, "PIECE", 64)
    tensors = {
        "m": torch.randn(37, 11), "b": torch.randn(9).bfloat16(), "steps": torch.tensor(3), "mask": torch.tensor([True, False]),
        "turned": torch.arange(60.0).reshape(5, 12).T, "part": torch.arange(10.0)[3:7], "nan": torch.tensor([float("nan"), -0.0]),
    }  # fmt: skip
    copies = copied(tensors)
    before = {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert {name: (copy.dtype, copy.shape, bits(copy)) for name, copy in copies.items()} == before
    assert all(copy.data_ptr() % ALIGNED == 0 for copy in copies.values())
    assert copied({}) == {}


def test_an_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("not one page")

    monkeypatch.setattr("numpy.copyto", fail)
    with pytest.raises(MemoryError, match="not one page"):
        copied({"m": torch.ones(3)})


def test_the_memory_goes_back_to_the_system_with_the_copies() -> None:
    tensor = torch.ones(64 * MB // 4)
    before = resident()
    copies = copied({"m": tensor})
    assert resident() - before > 60 * MB
    del copies
    assert resident() - before < 8 * MB


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([("one", 60, 61, "machine")], None),
        ([("one", 60, 59, "machine")], "copies of 0.06 GB on one: the machine's memory has room for 0.059 GB"),
        ([("one", 60, 100, "machine"), ("one", 60, 100, "machine")], "copies of 0.12 GB on one: the machine's memory has"),
        ([("one", 60, 100, "machine"), ("two", 60, 100, "machine")], None),
        ([("one", 60, 500, "machine"), ("two", 60, 50, "control group")], "copies of 0.06 GB on two: the control group's memory"),
        ([("one", 60, 500, "machine"), ("one", 60, -5, "control group")], "the control group's memory has room for 0 GB"),
    ],
)
def test_copies_must_fit_into_the_memory_of_each_host(
    ranks: list[tuple[str, int, int, str]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its ranks together; each rank decides the same, from what all of them say."""
    found: list[str | None] = []
    reported = [(host, size * MB, usable * MB, whose) for host, size, usable, whose in ranks]
    for host, size, usable, whose in reported:

        def gather(answers: list[Any], mine: Any, own: tuple[str, int, float, str] = (host, size, usable, whose)) -> None:
            assert mine == own
            answers[:] = reported

        total = 1000 * MB
        memory = Memory(int(usable + staging.SPARE * total), total, whose)
        monkeypatch.setattr(staging, "host_memory", lambda memory=memory: memory)
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(reported))
        monkeypatch.setattr(dist, "all_gather_object", gather)
        found.append(shortage(size))
    assert len(set(found)) == 1
    assert (found[0] is None) if reason is None else (found[0] is not None and reason in found[0])
