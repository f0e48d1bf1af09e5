"""Replacement for vLLM's sampler: one pass over the logits for all rows, with the random numbers of the embedded engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from workers.rollout.sampling import draw_from_logits, uniforms
from workers.rollout.vllm.rng import BEGUN, KEY

GREEDY_BELOW = 1e-5  # temperature below which vLLM decodes greedily


class SeededSampler(Sampler):
    """Sampler whose random numbers depend only on seed and position (workers/rollout/sampling.py).

    Returns the log-prob of the sampled token over the whole vocabulary. vLLM's own sampler needs a generator per request, each
    with a call of its own; it also materialises log-probs and noise of the whole vocabulary, and ranks that are not used.
    """

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's model runner, read for the requests and their positions in each step."""
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        self._names: list[str] = []
        """vLLM's ids of the last step's requests, which it gives to no others; then KEY and BEGUN of each."""
        self._keys, self._begun = np.array([], dtype=np.uint64), np.array([], dtype=np.int64)
        compiled = runner.device.type == "cuda" and not runner.model_config.enforce_eager
        self._draw = torch.compile(draw_from_logits) if compiled else draw_from_logits

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Sample from logits (n, V). Returns tokens int32 (n, 1) and the log-prob of each; ranks are reported as 0."""
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
                # The token comes from the truncated distribution, its log-prob from the full one below.
                kept = apply_top_k_top_p(logits.float() / temperature, asked.top_k, asked.top_p)
                given, _ = self._drawn(kept, torch.ones_like(temperature), uniform, None)
            if not asked.all_random:
                # Greedy rows get their token here; -1 leaves the others to be sampled below.
                given = torch.where(greedy, logits.argmax(-1, keepdim=True), -1 if given is None else given)
        tokens, log_probs = self._drawn(logits, temperature, uniform, given)
        ids, ranks = tokens.int(), torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
        return SamplerOutput(ids, LogprobsTensors(ids, log_probs, ranks))

    def _drawn(self, logits: Tensor, temperature: Tensor, uniform: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Call the (compiled) kernel with a dynamic number of rows, so that batch sizes do not recompile it.

        torch specialises on a size of 1 in any case: one row is a second compilation.
        """
        for tensor in (logits, temperature, uniform, *([] if given is None else [given])):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._draw(logits, temperature, uniform, given)

    def _uniforms(self) -> Tensor:
        """Random numbers of this step, float64 (n, 1), on CPU.

        The position of a row in its response is its cache length after the step minus its prompt length, plus the tokens of the
        response that are part of its prompt (Request.response_ids). Without speculative decoding vLLM knows it without a device
        synchronisation, even if the previous step's tokens are still in flight. During a chunked prefill vLLM discards the
        sampled token, so that its position, which lies before the response, does not matter.
        """
        batch = self._runner.input_batch
        n = batch.num_reqs
        if batch.req_ids != self._names:
            asked = [self._runner.requests[name].sampling_params.extra_args for name in batch.req_ids]
            self._names = [*batch.req_ids]
            self._keys = np.array([extra[KEY] for extra in asked], dtype=np.uint64)
            self._begun = np.array([extra[BEGUN] for extra in asked], dtype=np.int64)
        counts = self._runner.optimistic_seq_lens_cpu[:n].numpy() - batch.num_prompt_tokens[:n] + self._begun
        return torch.from_numpy(uniforms(self._keys, counts))[:, None]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy from CPU without synchronising with the device: pinned memory makes the copy asynchronous."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
