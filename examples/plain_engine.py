"""A rollout engine of your own, as plain as can be: no cache, no batch, each token a forward. docs/how_to/engine.md uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from workers.rollout.base import Completion, Request, Rollout, RolloutSpec, check_requests
from workers.rollout.sampling import sample, stream_keys, uniforms
from workers.rollout.verification import HeldWeight, PlainWeight


class PlainRollout(Rollout):
    def __init__(self, spec: RolloutSpec) -> None:
        self.device, self.max_length = torch.device(spec.device), spec.max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=spec.rollout.dtype).to(self.device).eval()
        self._running: dict[int, tuple[Request, list[int], list[float]]] = {}  # with the tokens and log-probs of its answer
        self._tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._running, max_length=self.max_length, vocab_size=self.model.config.vocab_size)
        self._running |= {request.id: (request, [], []) for request in requests}

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One token for each request."""
        self._check_awake()
        ended = []
        for request, tokens, log_probs in [*self._running.values()]:
            ids = torch.tensor([[*request.prompt_ids, *tokens]], device=self.device)
            token, log_prob = self._draw(request, len(tokens), self.model(ids).logits[0, -1:])
            tokens.append(token)
            log_probs.append(log_prob)
            self._tokens += 1
            stops = token in request.sampling.stop_token_ids and not request.sampling.ignore_eos
            if stops or len(tokens) == request.sampling.max_tokens or ids.shape[1] + 1 == self.max_length:
                ended.append(self._complete(request.id, "stop" if stops else "length"))
        return ended

    def _draw(self, request: Request, count: int, logits: Tensor) -> tuple[int, float]:
        """By the request's seed and the token's place alone, as the other engines draw. logits (1, V)."""
        sampling = request.sampling
        columns = (np.array([value]) for value in (sampling.temperature, sampling.top_k, sampling.top_p))
        token, log_prob = sample(logits, *columns, uniforms(stream_keys([request.seed]), np.array([count])))
        return int(token), float(log_prob)

    def _complete(self, id: int, reason: str) -> Completion:
        _, tokens, log_probs = self._running.pop(id)
        return Completion(id, tuple(tokens), tuple(log_probs), reason, self._version)

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        chosen = self._running.keys() if ids is None else self._running.keys() & set(ids)
        return [self._complete(id, "abort") for id in sorted(chosen)]

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """They have the names of transformers' modules. Each is copied, and cast to the engine's dtype."""
        self._check_takes_weights("load_weights")
        for name, tensor in weights:
            self.model.get_parameter(name).copy_(tensor)
        self._weights_there, self._version = True, version

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        """For the proof that they are the trainer's: where each of its tensors is now."""
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
        told = {"prompt_tokens": 0.0, "response_tokens": float(self._tokens), "decode_steps": 0.0, "cache_bytes": 0.0}
        self._tokens = 0
        return told
