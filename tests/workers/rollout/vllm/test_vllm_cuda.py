"""What vLLM's worker gets on CUDA, with vLLM's sleep mode played by a stand-in that refuses what the driver refuses."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.rollout.vllm import vllm_cuda
from workers.rollout.vllm.vllm_cuda import StagedWorker, completed

pytestmark = CPU_BUILD


@dataclass
class Allocation:
    tag: str
    is_asleep: bool = False


class Allocator:
    """As vLLM 0.26 has it: what sleeps is not looked at."""

    def __init__(self) -> None:
        self.all = [Allocation("weights"), Allocation("weights"), Allocation("kv_cache")]
        self.pointer_to_data = dict(enumerate(self.all, 1))

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for data in self.pointer_to_data.values():
            assert not data.is_asleep, "CUDA Error: invalid argument"
            data.is_asleep = True

    def wake_up(self, tags: list[str]) -> None:
        for data in self.pointer_to_data.values():
            if data.tag in tags:
                assert data.is_asleep, "mapped already"
                data.is_asleep = False

    def asleep(self) -> set[str]:
        return {data.tag for data in self.all if data.is_asleep}


class Buffers:
    """vLLM's worker: keeps the model's buffers while it sleeps, and puts them back when anything wakes."""

    allocator: Allocator
    kept = False

    def sleep(self, level: int) -> None:
        assert "weights" not in self.allocator.asleep(), "illegal memory access: buffers are read"
        self.kept = True
        self.allocator.sleep(())

    def wake_up(self, tags: list[str]) -> None:
        self.allocator.wake_up(tags)
        assert not self.kept or "weights" not in self.allocator.asleep(), "illegal memory access: buffers are written"
        self.kept = False


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    allocator = Allocator()
    monkeypatch.setattr(vllm_cuda, "get_mem_allocator_instance", lambda: allocator)
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(vllm_cuda.Worker, name, vars(Buffers)[name])
    worker: Any = object.__new__(StagedWorker)
    worker.allocator, worker.kept = allocator, False
    return worker


def test_parts_sleep_and_wake_in_any_order(worker: Any) -> None:
    worker.sleep(level=2)
    assert worker.allocator.asleep() == {"weights", "kv_cache"}
    worker.wake_up(["weights"])
    worker.sleep(level=2)  # the cache slept already
    assert worker.allocator.asleep() == {"weights", "kv_cache"}
    worker.wake_up(["kv_cache"])
    assert worker.allocator.asleep() == {"weights"}
    worker.sleep(level=2)  # the weights slept already
    worker.wake_up(["kv_cache"])
    assert worker.kept, "buffers wait for their memory"
    worker.wake_up(["weights"])
    assert not worker.kept and not worker.allocator.asleep()
    assert sorted(worker.allocator.pointer_to_data) == [1, 2, 3]


def test_float32_is_computed_in_float32() -> None:
    assert completed({"dtype": "float32"}, 0)["attention_backend"] == "FLEX_ATTENTION"
    assert "attention_backend" not in completed({"dtype": "bfloat16"}, 0)
    assert completed({"dtype": "float32", "attention_backend": "TRITON_ATTN"}, 0)["attention_backend"] == "TRITON_ATTN"
    assert "attention_backend" not in completed({"dtype": "float32", "attention_config": {}}, 0)


def test_the_workers_class_is_found_and_can_be_another() -> None:
    assert completed({"dtype": "bfloat16"}, 0)["worker_cls"] == "workers.rollout.vllm.vllm_cuda.StagedWorker"
    assert completed({"dtype": "bfloat16", "worker_cls": "another"}, 0)["worker_cls"] == "another"


def test_gpus_share_no_compiled_code() -> None:
    """vLLM hashes additional_config for the name of the compile cache's folder (test_vllm_cuda_compile_cache.py)."""
    keys = [completed({"dtype": "bfloat16", "additional_config": {"a": 1}}, gpu)["additional_config"] for gpu in (0, 1)]
    assert keys[0] != keys[1] and all(key["a"] == 1 for key in keys)
