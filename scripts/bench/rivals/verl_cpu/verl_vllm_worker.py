"""What vLLM's worker needs beside verl on CPU; rollout.engine_kwargs.vllm.worker_extension_cls names it."""

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl_cpu_patches import note


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict | None, base_sync_done: bool) -> None:
        """The CPU build has packed its weights for oneDNN: load_weights() would find empty ones. The model is one bucket."""
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        dtypes = sorted({str(weight.dtype) for _, weight in weights} | {str(self.model_runner.model_config.dtype)})
        note(kind="rollout", threads=torch.get_num_threads(), dtypes=dtypes)
