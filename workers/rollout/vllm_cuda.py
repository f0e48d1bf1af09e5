"""What vLLM needs on CUDA alone: a worker that may fall asleep half awake, and whose parts wake in any order."""

from __future__ import annotations

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker


class StagedWorker(Worker):
    """vLLM's worker. Its sleep mode takes for granted that all was awake before, and that weights wake first (0.26)."""

    def sleep(self, level: int = 1) -> None:
        """vLLM gives back the memory of what sleeps already a second time, which is an error: it does not see that here."""
        allocations = get_mem_allocator_instance().pointer_to_data
        asleep = {pointer: data for pointer, data in allocations.items() if data.is_asleep}
        for pointer in asleep:
            del allocations[pointer]
        if any(data.tag == "weights" for data in asleep.values()):
            get_mem_allocator_instance().sleep(offload_tags=())
        else:
            super().sleep(level)  # saves the model's buffers, which are among the weights
        allocations.update(asleep)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM puts the model's buffers back, which must wait for the weights' memory."""
        assert tags is not None
        allocations = get_mem_allocator_instance().pointer_to_data
        if "weights" in tags or not any(data.is_asleep for data in allocations.values() if data.tag == "weights"):
            super().wake_up(tags)
        else:
            get_mem_allocator_instance().wake_up(tags)
