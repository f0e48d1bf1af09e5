"""vLLM on CUDA: arguments, and a worker whose weights and KV cache sleep and wake in any order. Not loaded on CPU.

The colocated trainer wakes the weights first, for the sync, and the KV cache once its own memory is released. vLLM's sleep mode
(0.26) assumes that everything was awake before a sleep, and that the weights wake first.
"""

from __future__ import annotations

from typing import Any

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker

from workers.rollout.vllm_times import TimedStart


def completed(arguments: dict[str, Any], gpu: int) -> dict[str, Any]:
    """Complete EngineArgs with the worker below, and with an attention backend that computes in float32 for dtype float32.

    vLLM's own choice for float32, a Triton kernel, multiplies in TF32: log-probs then differ from the trainer's by 1e-3.

    gpu: index of the process's GPU, which becomes part of the key of vLLM's compile cache. Compiled code holds the index, but
    vLLM (0.26) looks code up by the rank within the engine, and each engine here has its rank 0 on another GPU: "CUDA driver
    error: invalid argument" (vLLM's pull request 38962).
    """
    exact = {}
    if arguments["dtype"] == "float32" and not {"attention_backend", "attention_config"} & arguments.keys():
        exact = {"attention_backend": "FLEX_ATTENTION"}
    keyed = {"additional_config": arguments.get("additional_config", {}) | {"tandem_gpu": gpu}}
    return {"worker_cls": f"{StagedWorker.__module__}.{StagedWorker.__qualname__}"} | exact | arguments | keyed


class StagedWorker(TimedStart, Worker):
    """vLLM's worker with a sleep mode for which any part may be asleep already and any part may wake first."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.lora_config is not None:
            from workers.rollout.vllm.vllm_lora import for_every_token

            for_every_token(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        """Put everything to sleep that is awake. Allocations that sleep already are hidden from vLLM meanwhile.

        vLLM would otherwise release their memory a second time, which is an error.
        """
        allocator = get_mem_allocator_instance()
        asleep = {pointer: data for pointer, data in allocator.pointer_to_data.items() if data.is_asleep}
        for pointer in asleep:
            del allocator.pointer_to_data[pointer]
        if any(data.tag == "weights" for data in asleep.values()):
            # The worker's own sleep would save the model's buffers, whose memory is gone: only the allocator sleeps.
            allocator.sleep(offload_tags=())
        else:
            super().sleep(level)  # also saves the model's buffers, which are allocated with the weights
        allocator.pointer_to_data.update(asleep)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the parts ``tags``.

        vLLM restores the model's buffers on every wake-up, even if only the cache wakes. That requires the memory of the weights:
        while they sleep, only the allocator wakes.
        """
        assert tags is not None
        allocator = get_mem_allocator_instance()
        sleeping = {data.tag for data in allocator.pointer_to_data.values() if data.is_asleep}
        if "weights" in sleeping and "weights" not in tags:
            allocator.wake_up(tags)
        else:
            super().wake_up(tags)
