"""What every rollout engine is: token ids in, token ids out. No tokenizer, no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from configs.schema.common import ModelConfig
from configs.schema.ppo import RolloutEngineConfig


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. top_k -1 and top_p 1 keep all tokens. max_tokens counts the response.

    stop_token_ids end an answer and are part of it; with ignore_eos they do not end it.
    """

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """seed fixes every draw of this answer, whatever else is in the batch."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """log_probs: log_softmax(logits / temperature) over the whole vocabulary, before top-k and top-p, of each token;
    at temperature 0, of the logits as they are. weight_version: what the last load_weights was given.
    """

    id: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """All a rollout engine is built from. max_model_len: prompt and response together, tokens."""

    model: ModelConfig
    rollout: RolloutEngineConfig
    max_model_len: int
    device: Literal["cpu", "cuda"]


class EngineAsleep(RuntimeError):
    """The engine was asked to work while its weights or its cache were away."""


class Rollout(ABC):
    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError, naming the request, for an empty or too long prompt or a foreign token."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """One decode step for all that run; the completions that ended in it. Raises EngineAsleep."""

    @abstractmethod
    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """End these requests (all, if None) now, with what they have."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Requests that wait or run."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All completions, in the order of the requests."""
        self.submit(requests)
        done: dict[int, Completion] = {}
        while self.unfinished:
            done.update((completion.id, completion) for completion in self.step())
        return [done[request.id] for request in requests]

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy weights (Hugging Face names, full tensors) into the engine and drop what depends on the old ones."""

    def share_weights(self, weights: dict[str, Tensor], version: int) -> bool:
        """Use the trainer's own tensors, no copy. False: this engine, or these tensors, cannot; call load_weights."""
        return False

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory of the cache and of weights that are not shared."""

    @abstractmethod
    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Take memory back. After waking weights, load_weights or share_weights must follow."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since the last call: prompt_tokens, response_tokens, decode_steps, cache_bytes."""
