"""Rollout engine SGLang: the first rank of a replica drives one engine for all its ranks, on CUDA and on CPU.

The engine runs in processes of its own (sglang_server.py), children of that rank's worker. It generates continuously, not step by
step: ``step`` returns what has finished since the last one. Before weights change or the engine sleeps, unfinished requests are
aborted in SGLang; their tokens are kept here and become part of the prompt when they are submitted again.

Weights travel through shared memory, two buckets alternately: one is filled while SGLang loads the other. Parts that are specific
to CPU are in sglang_cpu.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from workers.controller.group import WorkerInfo
from workers.controller.ports import hold_port
from workers.engine.hf.hf_model import DTYPES, empty_model, model_config, vocab_size
from workers.rollout.base import (
    Completion,
    EngineAsleep,
    FinishReason,
    NewTokens,
    Request,
    Response,
    Rollout,
    RolloutSpec,
    check_requests,
)
from workers.rollout.cached_attention import CACHED_ATTENTION, probe_cache_shape
from workers.rollout.sampling import keys_from, stream_keys
from workers.rollout.sglang.sglang_client import Client, SharedBucket
from workers.rollout.sync.buckets import buckets
from workers.rollout.sync.expected_weights import ExpectedWeights
from workers.rollout.sync.hf_names import FileNames
from workers.rollout.verification import HeldWeight, Lines, cost_of_reading

if TYPE_CHECKING:
    from peft import LoraConfig

    from workers.rollout.sglang.sglang_lora import AdapterInSGLang

# Bucket size on CPU, in bytes. Filling overlaps with loading only between buckets, so larger buckets overlap less.
AHEAD = 2**25
NO_WEIGHTS = bytes(ForkingPickler.dumps([]))
RESERVED = 8  # tokens of its context that SGLang does not give to prompts and responses (6 at 0.5.23)
ENVIRONMENT = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by RESERVED; request lengths are checked in submit
    "SYNC_TOKEN_IDS_ACROSS_TP": "1",  # all ranks of an engine continue with the same token, whatever each of them sampled
}


@dataclass(slots=True)
class PendingRequest(Response):
    """An unfinished response. submitted: SGLang has the request."""

    submitted: bool = False

    @property
    def name(self) -> str:
        """Name in SGLang. The slash keeps names from being prefixes of each other: SGLang aborts by prefix."""
        return f"{self.request.id}/"

    def ended(self, reason: str, max_length: int) -> FinishReason:
        """Finish reason, given SGLang's. A request that was aborted right at its last token has finished by itself."""
        sampling = self.request.sampling
        if reason == "stop" or (
            self.token_ids[-1:] and self.token_ids[-1] in sampling.stop_token_ids and not sampling.ignore_eos
        ):
            return "stop"
        return "length" if len(self.token_ids) == room_for(self.request, max_length) else "abort"


class SGLangRollout(Rollout):
    """One rank of a replica. Only the first rank has an engine (``engine`` is None on the others).

    The other ranks receive the same calls, return no completions, and take part in gathering weights.
    """

    takes_driver_memory = True

    def __init__(self, spec: RolloutSpec, place: WorkerInfo) -> None:
        self.tensor_parallel_size = spec.rollout.tensor_model_parallel_size
        self.max_length = spec.max_model_len
        self.dtype = DTYPES[spec.rollout.dtype]
        allowed = spec.rollout.update_weights_bucket_megabytes * 2**20 // 2  # half: the next bucket is gathered at the same time
        self.bucket_bytes = min(allowed, AHEAD) if spec.device == "cpu" else allowed
        self.device = torch.device("cpu") if spec.device == "cpu" else torch.device("cuda", place.local_rank)
        model = empty_model(spec.model, model_config(spec.model, "lm"), "lm", self.dtype).hf
        self._file_names = FileNames(model)
        self.expected = ExpectedWeights(dict(self.to_engine_names(model.state_dict(keep_vars=True).items())))
        self.vocab_size = vocab_size(spec.model)
        self._shared = [SharedBucket(number, self.device, self.dtype) for number in range(2)]
        self.adapter: AdapterInSGLang | None = None
        if spec.rollout.lora_sync == "adapter" and spec.model.has_adapter:
            from workers.rollout.sglang.sglang_lora import AdapterInSGLang  # loads peft

            self.adapter = AdapterInSGLang(spec.model)
            if spec.device == "cpu":
                self.adapter.check_even(self.tensor_parallel_size)
        # With an adapter the base survives sleep: in host memory on CUDA (enable_weights_cpu_backup), in place on CPU.
        self.keeps_weights = self.adapter is not None
        self._base_there = False
        self.engine: Client | None = None
        self._cache_bytes = 0.0
        self._wait_for_replica()  # before the engine starts, which allocates on every rank's device
        if place.rank % self.tensor_parallel_size == 0:
            arguments, environment = engine_arguments(spec, place.local_rank), ENVIRONMENT
            if self.adapter is not None:
                arguments |= self.adapter.arguments(spec.device)
            if spec.device == "cpu":
                from workers.rollout.sglang import sglang_cpu

                engines = place.n_groups * place.world_size // self.tensor_parallel_size
                arguments = sglang_cpu.completed(arguments, spec, token_bytes(spec, model), engines)
                environment = ENVIRONMENT | sglang_cpu.environment(self.tensor_parallel_size)
            with hold_port() as held:  # reserved until the engine listens on it
                self.engine = Client({"nccl_port": held.getsockname()[1], **arguments}, environment)
            self._cache_bytes = float(self.engine.facts["max_total_num_tokens"] * token_bytes(spec, model))
        self._pending: dict[int, PendingRequest] = {}
        self._ended: list[Completion] = []
        self._counters = self._zeros()

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        unfinished = {*self._pending, *(completion.id for completion in self._ended)}
        check_requests(requests, unfinished, max_length=self.max_length, vocab_size=self.vocab_size)
        if self.engine is not None:
            for request in requests:
                self._pending[request.id] = PendingRequest(request)
                self._counters["prompt_tokens"] += len(request.prompt_ids)

    @property
    def unfinished(self) -> int:
        return len(self._pending) + len(self._ended)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all completions, in the order of the requests; returns [] on ranks without an engine."""
        if self.engine is None:
            # A forgotten sync fails on every rank of the replica, as it does on the first one.
            self._check_awake()
            self.submit(requests)
            return []
        return super().generate(requests)

    def step(self) -> list[Completion]:
        """Return what has finished since the last step, after waiting for at least one response.

        Raises FloatingPointError, naming a request, where the model's logits are not finite.
        """
        self._check_awake()
        waiting = [pending for pending in self._pending.values() if not pending.submitted]
        # _ended is filled by _recall, when a request finished just before its abort: return these without waiting for others.
        if self.engine is not None and not self._ended and self._pending:
            for pending in waiting:
                pending.submitted = True
            submitted = [(pending.name, list(pending.known), sampling_arguments(pending, self.max_length)) for pending in waiting]
            self._take(self.engine.call("step", submitted))
            self._counters["decode_steps"] += 1
        ended, self._ended = self._ended, []
        return ended

    def _take(self, responses: list[tuple[str, list[int], list[float], str]]) -> None:
        """Append responses, or parts of aborted ones, to their requests; completes those that have finished."""
        for name, token_ids, log_probs, reason in responses:
            pending = self._pending[int(name.removesuffix("/"))]
            if not all(map(math.isfinite, log_probs)):
                raise FloatingPointError(
                    f"request {pending.request.id}: the model's logits are not finite (weights of version {self._version})"
                )
            pending.token_ids += token_ids
            pending.log_probs += log_probs
            pending.stamp(self._version)
            pending.submitted = False
            if (finish_reason := pending.ended(reason, self.max_length)) != "abort":
                self._ended.append(self._completion(pending, finish_reason))

    def _completion(self, pending: PendingRequest, finish_reason: FinishReason) -> Completion:
        del self._pending[pending.request.id]
        self._counters["response_tokens"] += len(pending.token_ids)
        return pending.completion(finish_reason, self._version)

    def new_tokens(self) -> list[NewTokens]:
        """SGLang returns the tokens of running requests when they are recalled: before weights change and before sleep."""
        new = [pending.take_new(self._version) for pending in self._pending.values()]
        return [tokens for tokens in new if tokens.token_ids]

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """End requests and return their completions: first those that had finished, with their finish reason, then partial ones.

        Ids that are not unfinished are ignored. Partial responses are in order of submission.
        """
        self._recall(ids)
        finished = {completion.id: completion for completion in self._ended if ids is None or completion.id in ids}
        self._ended = [completion for completion in self._ended if completion.id not in finished]
        parts = [
            self._completion(pending, "abort")
            for pending in list(self._pending.values())
            if ids is None or pending.request.id in ids
        ]
        return [*finished.values(), *parts]

    def _recall(self, ids: Sequence[int] | None = None) -> None:
        """Abort these requests (None: all) in SGLang, but keep them with their tokens; the next step resumes them."""
        submitted = [
            pending.name for pending in self._pending.values() if pending.submitted and (ids is None or pending.request.id in ids)
        ]
        if self.engine is not None and submitted:
            self._take(self.engine.call("abort", submitted))

    # Weights and memory

    def to_engine_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self._file_names.split(weights)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False) -> None:
        """Copy weights in buckets, cast to the engine's dtype; SGLang loads one and slices it per rank while the next is filled.

        Running requests are recalled: they keep their tokens, whose keys and values are recomputed with the new weights. Raises
        ValueError, naming weights that are missing, unexpected or of another shape, and RuntimeError with SGLang's message if it
        rejects them; the engine then has no weights.
        """
        assert not keep_cache, "rejected when the configuration is checked"
        self._check_takes_weights("load_weights")
        self._recall()
        self._weights_there = self._base_there = False
        came: dict[str, torch.Size] = {}
        if self.engine is None:  # the stream is collective: consume it, and note what came for the check below
            for _ in self.expected.fitting(weights, came):
                pass
        else:
            self.engine.begin("begin_update")
            # Buckets bypass SGLang's scheduler. An empty update goes through it first, and fails if SGLang refuses updates.
            self.engine.begin("update", [NO_WEIGHTS] * self.tensor_parallel_size)
            fitting, shared = self.expected.fitting(weights, came), cycle(self._shared)
            for named in buckets(fitting, lambda item: item[1].numel() * self.dtype.itemsize, self.bucket_bytes):
                self.engine.wait_for_ranks(left=1)  # the bucket before the last one has been loaded: its memory can be refilled
                bucket = next(shared)
                filled = [(name, tuple(view.shape), view.storage_offset()) for name, view in bucket.views(named)]
                named.clear()  # releases the gathered tensors
                self.engine.wait()  # raises what the calls above failed with, before any weight is written
                self.engine.begin_on_ranks("load", *bucket.handle(), filled)
            self.engine.wait_for_ranks()
            self.engine.begin("end_update")
            self.engine.call("flush")  # cached keys and values are those of the old weights
            self._release_buckets()
        self.expected.check(came)
        # With lora_sync=adapter the base alone is not the model that is trained: load_adapter completes it.
        self._base_there, self._weights_there, self._version = True, self.adapter is None, version

    def load_adapter(
        self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False
    ) -> None:
        """Replace the adapter, in a single transfer; SGLang keeps the shared memory until the next adapter.

        Raises ValueError, naming weights that are missing, unexpected or of another shape, RuntimeError with SGLang's message if
        it rejects them, and EngineAsleep without base weights. The engine then has no weights to generate with.
        """
        assert not keep_cache, "rejected when the configuration is checked"
        self._check_takes_weights("load_adapter")
        assert self.adapter is not None, "lora_sync=adapter alone"
        self._recall()
        self._weights_there = False
        came: dict[str, torch.Size] = {}
        named = list(self.adapter.expected.fitting(weights, came))
        self.adapter.expected.check(came)
        if not self._base_there:
            raise EngineAsleep("load_adapter: the engine has no base weights for an adapter; call load_weights")
        if self.engine is not None:
            # A new bucket each time, as SGLang keeps the memory of the current one.
            memory = SharedBucket(len(self._shared), torch.device("cpu"), self.dtype)
            views = memory.views(self.adapter.complete(named))
            filled = [(name, tuple(view.shape), view.storage_offset()) for name, view in views]
            name = self.engine.call("load_adapter", self.adapter.sglang_config(config), memory.handle()[1], filled)
            self.engine.begin_on_ranks("take_adapter", name, self.adapter.places)
            self.engine.wait_for_ranks()
            self.engine.call("flush")
        self._weights_there, self._version = True, version

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        """All weights of the engine; empty ones on ranks without an engine, where nothing can be read."""
        return self._held(self.expected)

    def held_adapter(self) -> Sequence[HeldWeight]:
        assert self.adapter is not None, "lora_sync=adapter alone"
        return self._held(self.adapter.expected)

    def _held(self, expected: ExpectedWeights) -> list[HeldWeight]:
        shapes = expected.shapes
        return [WeightInSGLang(name, () if self.engine is None else shape, self.dtype) for name, shape in shapes.items()]

    def read_held(self, lines: Sequence[Lines]) -> list[list[Tensor]]:
        wanted = [(chosen.held, chosen.start, chosen.stop) for chosen in lines]
        return [[values] for values in self.read_weights(wanted)]

    def read_weights(self, wanted: Sequence[tuple[Any, int, int]]) -> list[Tensor]:
        """Read numbers of the trainer's flattened tensors as SGLang computes with them, in the engine's dtype.

        wanted: (WeightInSGLang, start, stop): numbers [start, stop) of that tensor. Every rank of the engine reports what it
        holds. NaN means that no rank holds a number, or that ranks disagree. Raises RuntimeError with the traceback from SGLang's
        process.
        """
        if self.engine is None or not wanted:
            return []
        sizes, ranks = [stop - start for _, start, stop in wanted], self.engine.ranks
        # One copy per rank, in one shared buffer: each rank fills its own row, all at the same time.
        copies = self._shared[0].room(len(ranks) * sum(sizes)).view(len(ranks), -1)
        handle, which = self._shared[0].handle(), [(held.names[0], held.shape, start, stop) for held, start, stop in wanted]
        for rank, copy in zip(ranks, copies, strict=True):
            rank.begin("read", *handle, which, copy.storage_offset())
        self.engine.wait_for_ranks()
        self._release_buckets()
        return list(agreed(copies).split(sizes))

    def _release_buckets(self) -> None:
        """Release the GPU memory of the buckets."""
        for bucket in self._shared:
            bucket.release_device_memory()

    def sleep(self) -> None:
        """Unfinished requests are kept and resume after wake and new weights. On CPU SGLang releases no memory."""
        self._recall()
        awake = {"weights": self._weights_awake, "kv_cache": self._cache_awake}
        if self.engine is not None and any(awake.values()):
            self.engine.call("release", [tag for tag, is_awake in awake.items() if is_awake])
        self._weights_awake = self._weights_there = self._cache_awake = False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        wanted = {"weights": weights and not self._weights_awake, "kv_cache": kv_cache and not self._cache_awake}
        if any(wanted.values()):
            self._wait_for_replica()
        if self.engine is not None and any(wanted.values()):
            self.engine.call("resume", [tag for tag, is_wanted in wanted.items() if is_wanted])
        self._weights_awake |= weights
        self._cache_awake |= kv_cache

    def _wait_for_replica(self) -> None:
        """Barrier: the engine allocates on every rank's device, so all ranks must have released their memory first."""
        if self.tensor_parallel_size > 1 and self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1))  # over gloo: an NCCL barrier would allocate device memory

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def stats(self) -> dict[str, float]:
        """Counters since the last call.

        decode_steps: number of waits for responses, as SGLang does not report its own steps. cache_bytes: size of the KV cache
        while it is awake. A prompt counts once for each of its requests.
        """
        counters, self._counters = self._counters, self._zeros()
        return counters

    def _zeros(self) -> dict[str, float]:
        return {"prompt_tokens": 0.0, "response_tokens": 0.0, "decode_steps": 0.0, "cache_bytes": self._cache_bytes}


class WeightInSGLang(HeldWeight):
    """A tensor under the trainer's name, wherever SGLang keeps its numbers. A line is one number; read by read_weights only."""

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.names, self.lines, self.line_bytes = (name,), math.prod(shape) if shape else 0, dtype.itemsize
        self.cost = cost_of_reading(self.line_bytes, self.lines)
        self.shape, self._dtype = tuple(shape), dtype

    def expected(self, part: int, tensor: Tensor, start: int, stop: int) -> tuple[Tensor, float]:
        return tensor.detach().flatten()[start:stop].to(self._dtype, copy=True), 0.0

    def read(self, start: int, stop: int) -> list[Tensor]:
        raise AssertionError("SGLang is asked for all weights at once: read_held")


def agreed(copies: Tensor) -> Tensor:
    """Combine the ranks' numbers: (ranks, n), NaN where a rank holds none, to (n,), NaN where none holds one or they differ.

    With one rank, a view.
    """
    if len(copies) == 1:
        return copies[0]
    # NaN becomes +inf for the minimum and -inf for the maximum; these are equal only if all numbers that are there agree.
    low = copies.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(0)
    return torch.where(low == copies.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(0), low, torch.nan)


def engine_arguments(spec: RolloutSpec, first_gpu: int) -> dict[str, Any]:
    """Translate the rollout configuration to SGLang's ServerArgs. first_gpu: device index of the replica's first rank."""
    rollout = spec.rollout
    return {
        "model_path": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "json_model_override_args": json.dumps(spec.model.override_config),
        "context_length": spec.max_model_len + RESERVED,
        "tp_size": rollout.tensor_model_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_cuda_graph": rollout.enforce_eager,
        "cuda_graph_bs_decode": rollout.cudagraph_capture_sizes,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "dtype": rollout.dtype,
        "load_format": rollout.load_format,
        "random_seed": rollout.seed,
        "enable_memory_saver": spec.device == "cuda",
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "base_gpu_id": first_gpu,
        "log_level": "error",
        **rollout.engine_kwargs.sglang,
    }


def token_bytes(spec: RolloutSpec, model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values, over all ranks of an engine. model: on the meta device."""
    model.set_attn_implementation(CACHED_ATTENTION)
    shape = probe_cache_shape(model)
    heads = max(shape.kv_heads, spec.rollout.tensor_model_parallel_size)  # with fewer heads than ranks, heads are replicated
    return shape.layers * heads * (shape.key_dim + shape.value_dim) * DTYPES[spec.rollout.dtype].itemsize


def sampling_arguments(pending: PendingRequest, max_length: int) -> dict[str, Any]:
    """SamplingParams of SGLang for the rest of a response. max_length: of prompt and response together, in tokens."""
    sampling = pending.request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,  # 0 keeps all, which SGLang spells -1
        "top_p": sampling.top_p,
        "max_new_tokens": room_for(pending.request, max_length) - len(pending.token_ids),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        # Used on CPU (sglang_cpu.sample_by_seeds), and on CUDA with enable_deterministic_inference.
        "sampling_seed": stream_of(pending.request),
    }


def stream_of(request: Request) -> int:
    """Key of the request's random numbers, int64, counted by the position of a token's predecessor in the whole sequence.

    SGLang knows a token's position in the sequence only; counts of workers/rollout/sampling.py begin with the response.
    """
    key = keys_from(stream_keys([request.seed]), np.array([len(request.prompt_ids) - 1]))
    return int(key.view(np.int64)[0])


def room_for(request: Request, max_length: int) -> int:
    """Maximum number of tokens to sample, limited by max_tokens and by max_length of prompt and response together."""
    return min(request.sampling.max_tokens, max_length - len(request.prompt_ids)) - len(request.response_ids)
