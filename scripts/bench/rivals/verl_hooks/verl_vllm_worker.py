"""vLLM's worker beside verl, and what it tells of itself; rollout.engine_kwargs.vllm.worker_extension_cls names one."""

from collections.abc import Iterable
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl_measure import note


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict | None, base_sync_done: bool) -> None:
        """The CPU build has packed its weights for oneDNN: load_weights() would find empty ones. The model is one bucket."""
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        told(self, (weight for _, weight in weights))


class CUDAWorkerExtension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        told(self, self.model_runner.model.parameters())


def told(worker: vLLMColocateWorkerExtension, weights: Iterable[torch.Tensor]) -> None:
    dtypes = sorted({str(weight.dtype) for weight in weights} | {str(worker.model_runner.model_config.dtype)})
    note(kind="rollout", threads=torch.get_num_threads(), dtypes=dtypes)
