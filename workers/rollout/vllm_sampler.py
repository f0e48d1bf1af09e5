"""Stands for vLLM's sampler: one pass over the logits for all rows, and draws that are the embedded engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from workers.rollout.sampling import Softmax, block_sums, uniforms
from workers.rollout.vllm import KEY

GREEDY_BELOW = 1e-5  # temperature, in vLLM


class SeededSampler(Sampler):
    """Draws depend on seed and position alone; log-probs are of the drawn token, over the whole vocabulary.

    vLLM's own takes a generator for each request, and a call for each generator; it writes the whole vocabulary's log-probs and
    noise, and ranks that nobody asked for.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        compiled = runner.device.type == "cuda" and not runner.model_config.enforce_eager
        self._block_sums = torch.compile(block_sums) if compiled else block_sums

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """logits (n, V). Tokens int32 (n, 1), and of each its log-prob; its rank is said to be 0."""
        asked = sampling_metadata
        logits = self.apply_logits_processors(logits, asked, predict_bonus_token)
        for processor in asked.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        n = len(logits)
        if asked.temperature is None:  # all are greedy
            softmax = self._softmax(logits, logits.new_ones(n, 1, dtype=torch.float32))
            tokens = logits.argmax(-1, keepdim=True)
        else:
            temperature = asked.temperature[:, None]
            greedy = temperature < GREEDY_BELOW
            softmax = self._softmax(logits, temperature if asked.all_random else temperature.masked_fill(greedy, 1.0))
            tokens = self._cut(softmax, asked).draw(to_device(self._uniforms(), logits.device))
            if not asked.all_random:
                tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
        ranks = torch.zeros(n, dtype=torch.int32, device=logits.device)
        ids = tokens.int()
        return SamplerOutput(ids, LogprobsTensors(ids, softmax.log_prob(tokens), ranks))

    def _softmax(self, logits: Tensor, temperature: Tensor) -> Softmax:
        """Compiled at most twice, for one row and for any other number."""
        for tensor in (logits, temperature):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        largest, sums = self._block_sums(logits, temperature)
        return Softmax(logits, temperature, largest, sums.cumsum(-1))

    def _cut(self, softmax: Softmax, asked: Any) -> Softmax:
        """Without what top-k and top-p leave out."""
        if asked.top_k is None and asked.top_p is None:
            return softmax
        scaled = softmax.scaled(softmax.logits)
        kept = apply_top_k_top_p(scaled, asked.top_k, asked.top_p)
        return self._softmax(kept, torch.ones_like(softmax.temperature))

    def _uniforms(self) -> Tensor:
        """float64 (n, 1), on CPU. Where a prompt goes on entering, the token is drawn for nobody, and its position below 0.

        A row's position is what its cache holds after the step, less its prompt: as long as no token is guessed ahead, vLLM
        knows that without a look at the device, also with the last step's tokens still under way.
        """
        batch = self._runner.input_batch
        n = batch.num_reqs
        keys = [self._runner.requests[id].sampling_params.extra_args[KEY] for id in batch.req_ids]
        counts = self._runner.optimistic_seq_lens_cpu[:n].numpy() - batch.num_prompt_tokens[:n]
        return torch.from_numpy(uniforms(np.array(keys, dtype=np.uint64), counts))[:, None]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """From CPU, without waiting for what the device has under way."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
