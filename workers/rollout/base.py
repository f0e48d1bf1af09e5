"""What every rollout engine is: token ids in, token ids out. No tokenizer, no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from configs.schema.common import ModelConfig
from configs.schema.ppo import RolloutEngineConfig
from workers.rollout.progress import Progress
from workers.rollout.verification import HeldWeight, Lines

if TYPE_CHECKING:
    from peft import LoraConfig


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
    """All a rollout engine is built from. max_model_len: prompt and response together, tokens. run_dir: where it tells how far it
    is, see progress.py; None: nowhere."""

    model: ModelConfig
    rollout: RolloutEngineConfig
    max_model_len: int
    device: Literal["cpu", "cuda"]
    run_dir: Path | None = None


class EngineAsleep(RuntimeError):
    """The engine was asked to work while its weights or its cache were away."""


def check_requests(requests: Sequence[Request], unfinished: Collection[int], *, max_length: int, vocab_size: int) -> set[int]:
    """Refuses what no engine can answer, before one is asked. max_length: prompt and response together, tokens.

    Returns the ids that are unfinished with these. Raises ValueError.
    """
    ids = set(unfinished)
    for request in requests:
        length = len(request.prompt_ids)
        if request.id in ids:
            raise ValueError(f"request {request.id}: this id is unfinished")
        if not length:
            raise ValueError(f"request {request.id}: empty prompt")
        if length + 1 > max_length:
            raise ValueError(f"request {request.id}: prompt of {length} tokens + 1 > max_model_len {max_length}")
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < vocab_size:
                raise ValueError(f"request {request.id}: token {token} is outside the vocabulary of {vocab_size}")
        if request.sampling.max_tokens < 1:
            raise ValueError(f"request {request.id}: max_tokens {request.sampling.max_tokens} < 1")
        ids.add(request.id)
    return ids


class Rollout(ABC):
    tensor_parallel_size = 1
    """Consecutive ranks that are one engine: they get the same calls with the same arguments, and answer alike."""
    takes_driver_memory = False
    """On CUDA its memory does not come from this process's torch allocator: what that caches is not free for the engine."""
    keeps_weights = False
    """What load_weights has brought outlives sleep, so that load_adapter alone has to follow."""
    _weights_awake = _cache_awake = True
    _weights_there = False
    """Loaded or shared, since the engine was made or its weights woke."""
    _version = -1
    """Of these weights."""
    progress: Progress | None = None
    """Is told how far ``generate`` is."""

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
        tokens = 0
        if self.progress is not None:
            self.progress.begin(len(requests))
        while self.unfinished:
            ended = self.step()
            done.update((completion.id, completion) for completion in ended)
            if self.progress is not None:
                tokens += sum(len(completion.token_ids) for completion in ended)
                self.progress.tell(len(done), tokens)
        return [done[request.id] for request in requests]

    def in_its_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The trainer's weights, which have the names of transformers' modules, as load_weights takes them and held_weights names
        them: views. An engine that is transformers' own takes them as they are."""
        return weights

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy weights (names of in_its_names, full tensors) into the engine and drop what depends on the old ones."""

    def share_weights(self, weights: dict[str, Tensor], version: int) -> bool:
        """Use the trainer's own tensors, no copy. False: this engine, or these tensors, cannot; call load_weights."""
        return False

    def load_adapter(self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the LoRA adapter that lies beside the weights, which load_weights has brought; answers from now on are with it.

        weights: under peft's names for files, full tensors. With ``lora_sync=adapter`` alone; raises ValueError for what does not
        fit. Engines that have no adapters are refused when the configuration is checked.
        """
        raise ValueError(f"actor_rollout_ref.rollout.lora_sync=adapter: {type(self).__name__} takes no adapters")

    @abstractmethod
    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        """What this rank computes with, all of it, for verification: read when its weights have been loaded, or are shared.

        Of the trainer's tied names, the first. exact: each number by itself is wanted, even where that is dear.
        """

    def held_adapter(self) -> Sequence[HeldWeight]:
        """The same of the adapter that load_adapter has brought, under peft's names for files."""
        return ()

    def read_held(self, lines: Sequence[Lines]) -> Iterable[list[Tensor]]:
        """``HeldWeight.read`` for each; an engine that is asked over a wire answers all at once."""
        return (chosen.held.read(chosen.start, chosen.stop) for chosen in lines)

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory of the cache and of weights that are not shared."""

    @abstractmethod
    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Take memory back. After waking weights, load_weights or share_weights must follow."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the engine holds of this process, so that it can hold another engine."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since the last call: prompt_tokens, response_tokens, decode_steps, cache_bytes; and cached_tokens, of prompts,
        which the cache had and nothing computed, where the engine tells.
        """

    def _check_awake(self) -> None:
        if not self._weights_awake:
            raise EngineAsleep("step: the weights are asleep; call wake(weights=True), then load_weights or share_weights")
        if not self._weights_there:
            raise EngineAsleep("step: the engine has no weights since it was made or woke; call load_weights or share_weights")
        if not self._cache_awake:
            raise EngineAsleep("step: the KV cache is asleep; call wake(kv_cache=True)")

    def _check_takes_weights(self, call: str) -> None:
        if not self._weights_awake:
            raise EngineAsleep(f"{call}: the weights are asleep; call wake(weights=True)")
