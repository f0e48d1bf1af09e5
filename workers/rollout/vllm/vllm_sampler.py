"""Stands for vLLM's sampler: one pass over the logits for all rows, and draws that are the embedded engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from workers.rollout.sampling import draw_from_logits, uniforms
from workers.rollout.vllm.rng import KEY

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
        self._draw = torch.compile(draw_from_logits) if compiled else draw_from_logits

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
        uniform = to_device(self._uniforms(), logits.device)
        if asked.temperature is None:  # all are greedy
            temperature, given = torch.ones(len(logits), 1, device=logits.device), logits.argmax(-1, keepdim=True)
        else:
            temperature, given = asked.temperature[:, None], None
            greedy = temperature < GREEDY_BELOW
            if not asked.all_random:
                temperature = temperature.masked_fill(greedy, 1.0)
            if asked.top_k is not None or asked.top_p is not None:
                kept = apply_top_k_top_p(logits.float() / temperature, asked.top_k, asked.top_p)
                given, _ = self._drawn(kept, torch.ones_like(temperature), uniform, None)
            if not asked.all_random:
                given = torch.where(greedy, logits.argmax(-1, keepdim=True), -1 if given is None else given)
        tokens, log_probs = self._drawn(logits, temperature, uniform, given)
        ids, ranks = tokens.int(), torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
        return SamplerOutput(ids, LogprobsTensors(ids, log_probs, ranks))

    def _drawn(self, logits: Tensor, temperature: Tensor, uniform: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is compiled is for any number of rows, but for one, which is compiled for itself."""
        for tensor in (logits, temperature, uniform, *([] if given is None else [given])):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._draw(logits, temperature, uniform, given)

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
