"""Custom rollout engine, minimal: no cache, no batching, one forward pass per token. Used by docs/how_to/engine.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from workers.rollout.base import Completion, FinishReason, NewTokens, Request, Response, Rollout, RolloutSpec, check_requests
from workers.rollout.sampling import sample, stream_keys, uniforms
from workers.rollout.verification import HeldWeight, PlainWeight


class PlainRollout(Rollout):
    """Rollout engine on a transformers model."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.device, self.max_length = torch.device(spec.device), spec.max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=spec.rollout.dtype).to(self.device).eval()
        self._running: dict[int, Response] = {}
        self._tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._running, max_length=self.max_length, vocab_size=self.model.config.vocab_size)
        self._running |= {request.id: Response(request) for request in requests}

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one token for every running request; return completed ones."""
        self._check_awake()
        ended = []
        for response in [*self._running.values()]:
            request, known = response.request, response.known
            count = len(known) - len(request.prompt_ids)
            token, log_prob = self._sample(request, count, self.model(torch.tensor([known], device=self.device)).logits[0, -1:])
            response.token_ids.append(token)
            response.log_probs.append(log_prob)
            self._tokens += 1
            stops = token in request.sampling.stop_token_ids and not request.sampling.ignore_eos
            if stops or count + 1 == request.sampling.max_tokens or len(known) + 1 == self.max_length:
                ended.append(self._complete(request.id, "stop" if stops else "length"))
        return ended

    def _sample(self, request: Request, count: int, logits: Tensor) -> tuple[int, float]:
        """Sample a token and its log-prob from logits (1, V); ``count``: tokens of the response so far."""
        # Random numbers depend on the request's seed and the token's position only, as in the other engines: a response is the
        # same in any batch, in any order, and after an interruption.
        sampling = request.sampling
        columns = (np.array([value]) for value in (sampling.temperature, sampling.top_k, sampling.top_p))
        token, log_prob = sample(logits, *columns, uniforms(stream_keys([request.seed]), np.array([count])))
        return int(token), float(log_prob)

    def _complete(self, id: int, reason: FinishReason) -> Completion:
        return self._running.pop(id).completion(reason, self._version)

    def new_tokens(self) -> list[NewTokens]:
        new = [response.take_new(self._version) for response in self._running.values()]
        return [tokens for tokens in new if tokens.token_ids]

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        chosen = self._running.keys() if ids is None else self._running.keys() & set(ids)
        return [self._complete(id, "abort") for id in sorted(chosen)]

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy weights by their transformers names, cast to the engine's dtype."""
        self._check_takes_weights("load_weights")
        for response in self._running.values():
            response.stamp(self._version)
        for name, tensor in weights:
            self.model.get_parameter(name).copy_(tensor)
        self._weights_there, self._version = True, version

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        """The engine's tensors, compared with the trainer's by the verification after a weight sync."""
        return [PlainWeight(name, lambda name=name: self.model.get_parameter(name)) for name, _ in self.model.named_parameters()]

    def sleep(self) -> None:
        self.model.to("cpu")
        self._weights_awake = self._weights_there = self._cache_awake = False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        if weights:
            self.model.to(self.device)
        self._weights_awake |= weights
        self._cache_awake |= kv_cache

    def close(self) -> None:
        self.sleep()

    def stats(self) -> dict[str, float]:
        counters = {"prompt_tokens": 0.0, "response_tokens": float(self._tokens), "decode_steps": 0.0, "cache_bytes": 0.0}
        self._tokens = 0
        return counters
