"""The interface of rollout engines: token ids in, token ids and log-probs out. No tokenizer, no algorithm.

An engine (embedded, vLLM, SGLang) implements ``Rollout``: requests are submitted, ``step`` returns the completions that finished,
weights arrive with ``load_weights`` or ``share_weights``, and ``sleep`` and ``wake`` hand device memory back and forth between
trainer and engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from configs.base.keys import ConfigError
from configs.schema.common import ModelConfig
from configs.schema.ppo import RolloutEngineConfig
from workers.rollout.verification import HeldWeight, Lines

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request.

    temperature: 0 is greedy. top_k: -1 keeps all tokens. top_p: 1 keeps all tokens. max_tokens: maximum length of the response.
    stop_token_ids: tokens that end a response and are part of it. ignore_eos: stop_token_ids do not end the response.
    """

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False

    @property
    def divisor(self) -> float:
        """What logits are divided by for log-probs: the temperature, and 1 for greedy responses."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to generate a response for, or to continue one.

    seed: determines the random number of every token of the response, independently of the other requests in the batch.
    response_ids: beginning of the response, sampled earlier. max_tokens counts it, random numbers continue at its end, and the
    completion has the tokens after it only.
    """

    id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    response_ids: tuple[int, ...] = ()


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """The response to a request, without the request's own response_ids.

    log_probs: of each token, log_softmax(logits / temperature) over the whole vocabulary, before top-k and top-p; at temperature
    0, log_softmax(logits). finish_reason: "stop" by a stop token, "length" by max_tokens or max_model_len, "abort" by ``abort``.
    versions: of each token, the version of the weights that it was sampled with.
    """

    id: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[int, ...]


@dataclass(slots=True)
class Response:
    """The response to an unfinished request, as engines keep it: what was sampled after ``request.response_ids``.

    log_probs: see Completion. versions: of the tokens up to the last change of weights; later tokens have the engine's version.
    reported: number of tokens that ``take_new`` has returned.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reported: int = 0

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and response so far: the tokens to be processed before the next one can be sampled."""
        return (*self.request.prompt_ids, *self.request.response_ids, *self.token_ids)

    def stamp(self, version: int) -> None:
        """Record that all tokens so far were sampled with ``version`` or earlier: the weights are about to change."""
        self.versions += [version] * (len(self.token_ids) - len(self.versions))

    def completion(self, finish_reason: FinishReason, version: int) -> Completion:
        """The completion with what was sampled so far. version: of the engine's weights."""
        self.stamp(version)
        return Completion(self.request.id, tuple(self.token_ids), tuple(self.log_probs), finish_reason, tuple(self.versions))

    def take_new(self, version: int) -> NewTokens:
        """The tokens since the last call. version: of the engine's weights."""
        self.stamp(version)
        new = slice(self.reported, None)
        self.reported = len(self.token_ids)
        return NewTokens(self.request.id, self.token_ids[new], self.log_probs[new], self.versions[new])


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Further tokens of an unfinished response; log_probs and versions as in Completion."""

    id: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]

    def partial(self) -> Completion:
        """The tokens in the form of an unfinished response that was aborted."""
        return Completion(self.id, tuple(self.token_ids), tuple(self.log_probs), "abort", tuple(self.versions))


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Everything that a rollout engine is built from.

    max_model_len: maximum length of prompt and response together, in tokens. run_dir: directory for progress reports
    (progress.py); None: no reports. tokenizer: with which the role decodes responses, see RolloutRole; no engine reads it.
    """

    model: ModelConfig
    rollout: RolloutEngineConfig
    max_model_len: int
    device: Literal["cpu", "cuda"]
    run_dir: Path | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


class EngineAsleep(RuntimeError):
    """A call needs weights or a KV cache that are asleep or not loaded."""


def check_requests(requests: Sequence[Request], unfinished: Collection[int], *, max_length: int, vocab_size: int) -> set[int]:
    """Validate ``requests`` before they reach an engine; returns the ids that are unfinished once they are queued.

    unfinished: ids of earlier requests. max_length: maximum length of prompt and response together, in tokens. Raises ValueError,
    naming the request, for an id that is unfinished, an empty or too long prompt, a token outside the vocabulary, or
    max_tokens without room for a further token.
    """
    ids = set(unfinished)  # a copy: a rejected call must not change what the caller regards as unfinished
    for request in requests:
        length = len(request.prompt_ids)
        if request.id in ids:
            raise ValueError(f"request {request.id}: this id is unfinished")
        if not length:
            raise ValueError(f"request {request.id}: empty prompt")
        begun = len(request.response_ids)
        if length + begun + 1 > max_length:  # at least one token is generated
            known = f"prompt of {length} tokens" + (f" + response of {begun}" if begun else "")
            raise ValueError(f"request {request.id}: {known} + 1 > max_model_len {max_length}")
        for token in (*extremes(request.prompt_ids), *extremes(request.response_ids)):  # they bound all others
            if not 0 <= token < vocab_size:
                raise ValueError(f"request {request.id}: token {token} is outside the vocabulary of {vocab_size}")
        if request.sampling.max_tokens < begun + 1:
            raise ValueError(f"request {request.id}: max_tokens {request.sampling.max_tokens} < {begun + 1}")
        ids.add(request.id)
    return ids


def extremes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The smallest and the largest; nothing of an empty sequence."""
    return (min(token_ids), max(token_ids)) if token_ids else ()


class Rollout(ABC):
    """A rollout engine as seen by one rank.

    State: weights and KV cache sleep and wake independently. ``step`` requires both to be awake and weights to have been loaded
    or shared since they woke; EngineAsleep names what is missing, so that a forgotten sync cannot go unnoticed.
    """

    tensor_parallel_size = 1
    """Number of consecutive ranks that form one engine. They receive the same calls with the same arguments."""
    takes_driver_memory = False
    """On CUDA, the engine allocates outside this process's torch allocator; blocks that torch caches are not free for it."""
    keeps_weights = False
    """Weights loaded by load_weights survive sleep, so that only load_adapter has to follow."""
    prefilled: int | None = None
    """Tokens of prompts and earlier responses that the last step began to compute; None: the engine cannot tell."""
    _weights_awake = _cache_awake = True
    _weights_there = False
    """Weights were loaded or shared since the engine was built or its weights woke."""
    _version = -1
    """Version of these weights."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError, naming the request, for an empty or too long prompt or a token out of range."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Run one decode step for all running requests; returns the completions that finished in it. Raises EngineAsleep."""

    @abstractmethod
    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """End these requests (None: all) now; returns their partial responses."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of requests that wait or run."""

    @abstractmethod
    def new_tokens(self) -> list[NewTokens]:
        """Tokens of unfinished requests since the last call, in order of submission; requests without any are left out.

        A completion has all tokens of its request, whether they were returned here or not.
        """

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate a completion for each request, in the order of the requests."""
        self.submit(requests)
        done: dict[int, Completion] = {}
        while self.unfinished:
            done.update((completion.id, completion) for completion in self.step())
        return [done[request.id] for request in requests]

    def to_engine_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename and split the trainer's weights into the tensors that load_weights takes and held_weights names, as views.

        weights: named as transformers' modules. An engine that runs transformers' modules takes them unchanged.
        """
        return weights

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False) -> None:
        """Copy weights into the engine and drop whatever depends on the old ones (KV and prefix caches).

        weights: full tensors, named as by to_engine_names. keep_cache: running requests continue with the keys and values that
        they have, which no other request shares from now on. Engines that cannot are rejected when the configuration is checked.
        """

    def share_weights(self, weights: dict[str, Tensor], version: int) -> bool:
        """Use the trainer's own tensors without a copy. Returns False if this engine cannot use them; then call load_weights."""
        return False

    def load_adapter(
        self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False
    ) -> None:
        """Replace the LoRA adapter on top of the base weights that load_weights copied; later responses use the new one.

        weights: full tensors under the names of peft's files. keep_cache: see load_weights. Used only with ``lora_sync=adapter``.
        Raises ValueError for weights that do not fit. Engines without adapters are rejected when the configuration is checked.
        """
        raise ConfigError(f"actor_rollout_ref.rollout.lora_sync=adapter: {type(self).__name__} takes no adapters")

    @abstractmethod
    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        """All weights that this rank computes with, for verification. Read after weights were loaded or shared.

        Tied tensors have the first of their names in the trainer. exact: compare element-wise even if expensive.
        """

    def held_adapter(self) -> Sequence[HeldWeight]:
        """All tensors of the adapter from load_adapter, under the names of peft's files; empty without an adapter."""
        return ()

    def read_held(self, lines: Sequence[Lines]) -> Iterable[list[Tensor]]:
        """Call ``HeldWeight.read`` for each item. Engines in another process override this to read all in one round trip."""
        return (chosen.held.read(chosen.start, chosen.stop) for chosen in lines)

    @abstractmethod
    def sleep(self) -> None:
        """Release the memory of the KV cache and of weights that are not shared."""

    @abstractmethod
    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Reacquire memory. Waking weights leaves them undefined: load_weights or share_weights must follow."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources that the engine holds in this process, so that the process can build another engine."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since the last call.

        prompt_tokens, response_tokens, decode_steps, cache_bytes and, if the engine reports it, cached_tokens: prompt tokens that
        were found in the cache instead of computed.
        """

    def _check_awake(self) -> None:
        # In the order of a sync (wake weights, load, wake cache), so that the message names the first call that is missing.
        if not self._weights_awake:
            raise EngineAsleep("step: the weights are asleep; call wake(weights=True), then load_weights or share_weights")
        if not self._weights_there:
            raise EngineAsleep("step: the engine has no weights since it was made or woke; call load_weights or share_weights")
        if not self._cache_awake:
            raise EngineAsleep("step: the KV cache is asleep; call wake(kv_cache=True)")

    def _check_takes_weights(self, call: str) -> None:
        if not self._weights_awake:
            raise EngineAsleep(f"{call}: the weights are asleep; call wake(weights=True)")
