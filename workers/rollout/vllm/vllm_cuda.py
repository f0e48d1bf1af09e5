"""What vLLM needs on CUDA alone: arguments, and a worker whose parts sleep and wake in any order. Not loaded on CPU."""

from __future__ import annotations

from typing import Any

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker

from workers.rollout.vllm_times import TimedStart


def completed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of EngineArgs with the worker below; and for float32 attention that computes in float32.

    vLLM's own choice there, Triton's kernel, multiplies in TF32: log-probs are 1e-3 beside the trainer's.
    """
    exact = {}
    if arguments["dtype"] == "float32" and not {"attention_backend", "attention_config"} & arguments.keys():
        exact = {"attention_backend": "FLEX_ATTENTION"}
    return {"worker_cls": f"{StagedWorker.__module__}.{StagedWorker.__qualname__}"} | exact | arguments


class StagedWorker(TimedStart, Worker):
    """vLLM's worker. Its sleep mode takes for granted that all was awake before, and that the weights wake first (0.26)."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.lora_config is not None:
            from workers.rollout.vllm.vllm_lora import for_every_token

            for_every_token(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        """vLLM would give back the memory of what sleeps already a second time, an error: it does not see that here."""
        allocator = get_mem_allocator_instance()
        asleep = {pointer: data for pointer, data in allocator.pointer_to_data.items() if data.is_asleep}
        for pointer in asleep:
            del allocator.pointer_to_data[pointer]
        if any(data.tag == "weights" for data in asleep.values()):
            allocator.sleep(offload_tags=())
        else:
            super().sleep(level)  # keeps the model's buffers, which are among the weights
        allocator.pointer_to_data.update(asleep)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM puts the model's buffers back whatever wakes: that must wait for the memory of the weights."""
        assert tags is not None
        allocator = get_mem_allocator_instance()
        sleeping = {data.tag for data in allocator.pointer_to_data.values() if data.is_asleep}
        if "weights" in sleeping and "weights" not in tags:
            allocator.wake_up(tags)
        else:
            super().wake_up(tags)
