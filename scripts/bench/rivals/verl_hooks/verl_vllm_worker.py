"""Worker extensions of vLLM in verl that note threads and dtypes; set with rollout.engine_kwargs.vllm.worker_extension_cls."""

from collections.abc import Iterable
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl_measure import note


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict | None, base_sync_done: bool) -> None:
        """Reload the weights: the CPU build has packed them for oneDNN, and load_weights() would find empty tensors.

        The whole model is one bucket.
        """
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        note_weights(self, (weight for _, weight in weights))


class CUDAWorkerExtension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        note_weights(self, self.model_runner.model.parameters())


def note_weights(worker: vLLMColocateWorkerExtension, weights: Iterable[torch.Tensor]) -> None:
    dtypes = sorted({str(weight.dtype) for weight in weights} | {str(worker.model_runner.model_config.dtype)})
    note(kind="rollout", threads=torch.get_num_threads(), dtypes=dtypes)
