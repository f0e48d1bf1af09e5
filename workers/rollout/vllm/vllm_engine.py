"""Rollout engine vLLM in the worker's own process, colocated with the trainer's shards, on CUDA and on CPU.

Every rank builds an engine («external launcher»). The ranks of a replica receive the same requests in the same order, so their
schedulers make the same decisions without communication. Parts that are specific to CPU are in vllm_cpu.py, those of CUDA in
vllm_cuda.py.

vLLM is built for a process of its own. Sharing one with a trainer means that its use of global random state is undone
(rng.fenced), that the trainer's process group outlives the engine (leave_groups), and that its freezing of the garbage collector
is reverted.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from workers.controller.environment import set_environment
from workers.controller.group import WorkerInfo
from workers.engine.hf.hf_model import DTYPES, empty_model, model_config, vocab_size
from workers.rollout.base import (
    Completion,
    EngineAsleep,
    NewTokens,
    Request,
    Response,
    Rollout,
    RolloutSpec,
    check_requests,
)
from workers.rollout.sampling import stream_keys
from workers.rollout.sync.expected_weights import ExpectedWeights
from workers.rollout.sync.hf_names import FileNames
from workers.rollout.verification import HeldWeight
from workers.rollout.vllm.rng import BEGUN, KEY, fenced

if TYPE_CHECKING:
    from peft import LoraConfig

    from workers.rollout.vllm.vllm_lora import ExpectedAdapter

ENVIRONMENT = {
    # The engine core runs in this process, next to the trainer's shards.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # SeededSampler replaces the sampler of the V1 runner
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0",  # an id of vLLM's names one request, even if a response is continued
}


@dataclass(slots=True)
class RunningResponse(Response):
    """An unfinished response. name: its id within vLLM."""

    name: str = ""


class VLLMRollout(Rollout):
    """One rank of a vLLM engine.

    _fenced: context for every call that computes or draws random numbers. _packed: how to verify layers that compute with packed
    copies (CPU). _adapter: the LoRA adapter's names and shapes with lora_sync=adapter, else None.
    """

    takes_driver_memory = True
    _fenced: Callable[[], AbstractContextManager[None]]
    _packed: Callable[..., list[HeldWeight]]
    _adapter: ExpectedAdapter | None = None
    _base_there = False
    """The base weights of an adapter are loaded; they survive sleep."""
    _salt: str | None = None
    """Of the cached prefixes of the present weights, where those of earlier ones may be in the cache too."""

    def __init__(self, spec: RolloutSpec, place: WorkerInfo) -> None:
        """Collective over all ranks: vLLM builds its groups from the ranks of the trainer's process group, which must exist."""
        self.tensor_parallel_size = spec.rollout.tensor_model_parallel_size
        self.max_length = spec.max_model_len
        self._dtype = DTYPES[spec.rollout.dtype]
        model = empty_model(spec.model, model_config(spec.model, "lm"), "lm", self._dtype).hf
        self._file_names = FileNames(model)
        self.expected = ExpectedWeights(dict(self.to_engine_names(model.state_dict(keep_vars=True).items())))
        self.vocab_size = vocab_size(spec.model)
        arguments = engine_arguments(spec)
        import_vllm(spec.device)
        from workers.rollout.vllm.vllm_scheduler import DecodeScheduler

        with ExitStack() as opening:
            opening.enter_context(set_environment(ENVIRONMENT | addresses(place)))
            self._fenced, self._packed = fenced, nothing_packed
            if spec.rollout.lora_sync == "adapter" and spec.model.has_adapter:
                from workers.rollout.vllm.vllm_lora import ExpectedAdapter

                self._adapter, self.keeps_weights = ExpectedAdapter(spec.model), True
                arguments |= self._adapter.arguments()
            if spec.device == "cuda":
                from workers.rollout.vllm import vllm_cuda

                arguments = vllm_cuda.completed(arguments, place.local_rank)
            else:
                from workers.rollout.vllm import vllm_cpu

                vllm_cpu.set_environment()
                arguments = vllm_cpu.completed(arguments, spec, model, place)
                self._fenced, self._packed = vllm_cpu.fenced_uncompiled, vllm_cpu.packed_weight
            with self._fenced():
                load_model_classes(model.config.architectures or ())
                self.engine = make_engine(arguments)
                scheduler = self.engine.engine_core.engine_core.scheduler
                self._decoding = DecodeScheduler(scheduler)
                scheduler.schedule = partial(self._scheduled, scheduler.schedule)
                self._cache_bytes = float(self._on_worker(prepare_worker))
            self._opened = opening.pop_all()  # the environment is restored by close, or at once if the engine did not start
        gc.unfreeze()  # vLLM calls gc.freeze, which exempts all objects of the process from collection, the trainer's too
        self._running: dict[str, RunningResponse] = {}
        """Unfinished requests by vLLM's ids, in order of submission."""
        self._counters = self._zeros()

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        # Not at the top of the module: vLLM reads environment variables on import, see import_vllm.
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        unfinished = {running.request.id for running in self._running.values()}
        check_requests(requests, unfinished, max_length=self.max_length, vocab_size=self.vocab_size)
        processor, tasks = self.engine.input_processor, self.engine.get_supported_tasks()
        for request in requests:
            params = SamplingParams(**sampling_arguments(request, self.max_length), output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"type": "token", "prompt_token_ids": [*request.prompt_ids, *request.response_ids]}
            prompt |= {} if self._salt is None else {"cache_salt": self._salt}
            engine_request = processor.process_inputs(str(request.id), prompt, params, supported_tasks=tasks)
            processor.assign_request_id(engine_request)  # vLLM's own id, under which outputs arrive
            self.engine.engine_core.add_request(engine_request)
            self._running[engine_request.request_id] = RunningResponse(request, name=engine_request.request_id)
            self._counters["prompt_tokens"] += len(request.prompt_ids)

    @property
    def unfinished(self) -> int:
        return len(self._running)

    def new_tokens(self) -> list[NewTokens]:
        new = [running.take_new(self._version) for running in self._running.values()]
        return [tokens for tokens in new if tokens.token_ids]

    def step(self) -> list[Completion]:
        """Run one decode step. Raises FloatingPointError, naming a request, where the model's logits are not finite.

        Reads the output of the engine core directly: vLLM's output processor builds objects for each token's log-prob, which for
        hundreds of responses takes as long as the rest of a step.
        """
        self._check_awake()
        self.prefilled = 0
        if not self._running:
            return []
        with self._fenced():
            outputs = self.engine.engine_core.get_output().outputs
        self._counters["decode_steps"] += 1
        ended = []
        for name, token_id, log_prob in self._decoding.take():
            running = self._running[name]
            running.token_ids.append(token_id)
            running.log_probs.append(log_prob)
        for output in outputs:
            running = self._running[output.request_id]
            running.token_ids += output.new_token_ids
            running.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.prefill_stats is not None:
                self._counters["cached_tokens"] += output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                del self._running[running.name]
                ended.append(self._completion(running, str(output.finish_reason)))
        return ended

    def _scheduled(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """vLLM's scheduler.schedule. A request that decodes has one token in a step."""
        step = schedule(*args, **kwargs)
        self.prefilled = (self.prefilled or 0) + step.total_num_scheduled_tokens - len(step.num_scheduled_tokens)
        return step

    def _completion(self, running: RunningResponse, reason: Any) -> Completion:
        if not all(map(math.isfinite, running.log_probs)):
            raise FloatingPointError(
                f"request {running.request.id}: the model's logits are not finite (weights of version {self._version})"
            )
        self._counters["response_tokens"] += len(running.token_ids)
        return running.completion(reason, self._version)

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """End requests and return their partial responses in order of submission.

        Ids that are not unfinished are ignored: the request may have finished in the meantime.
        """
        chosen = [running for running in self._running.values() if ids is None or running.request.id in ids]
        self.engine.engine_core.abort_requests([running.name for running in chosen])
        for running in chosen:
            del self._running[running.name]
        return [self._completion(running, "abort") for running in chosen]

    # Weights and memory

    def to_engine_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self._file_names.split(weights)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False) -> None:
        """Copy weights: vLLM takes one tensor after the other, slices this rank's part and casts it.

        Running requests return to the queue with their tokens, which are recomputed with the new weights. With lora_sync=adapter
        the engine cannot generate until load_adapter follows. Raises ValueError, naming weights that are missing, unexpected or
        of another shape; the engine then has no weights.
        """
        self._check_takes_weights("load_weights")
        # Cleared first: if loading fails, the engine may hold a mixture of old and new weights.
        self._weights_there = self._base_there = False
        self._leave_weights(version, keep_cache=keep_cache)
        came: dict[str, torch.Size] = {}
        with self._fenced(), torch.no_grad():
            fitting = self.expected.fitting(weights, came)
            self._with_own_layers(lambda worker: worker.reload_weights(weights_iterator=fitting))
        self.expected.check(came)
        self._weights_there, self._base_there, self._version = self._adapter is None, self._adapter is not None, version

    def load_adapter(
        self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False
    ) -> None:
        """Replace the adapter. Running requests are treated as in load_weights.

        Raises ValueError, naming weights that are missing, unexpected or of another shape, and EngineAsleep without base weights;
        the engine then has no weights to generate with.
        """
        self._check_takes_weights("load_adapter")
        assert self._adapter is not None, "lora_sync=adapter alone"
        if not self._base_there:
            raise EngineAsleep("load_adapter: the engine has no base weights for an adapter; call load_weights")
        from workers.rollout.vllm.vllm_lora import replace_adapter

        self._weights_there = False
        self._leave_weights(version, keep_cache=keep_cache)
        came: dict[str, torch.Size] = {}
        expected = self._adapter.weights
        # Copies even if already on CPU: vLLM scales B in place, and the stream may yield the trainer's own tensors.
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in expected.fitting(weights, came)}
        expected.check(came)
        with self._fenced(), torch.no_grad():
            self._on_worker(partial(replace_adapter, config=config, tensors=tensors))
        self._weights_there, self._version = True, version

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        from workers.rollout.vllm.vllm_weights import held_weights

        packed = partial(self._packed, exact=exact)
        return self._with_own_layers(
            lambda worker: held_weights(worker.model_runner.model, self.expected.first_name, self._dtype, packed)
        )

    def held_adapter(self) -> Sequence[HeldWeight]:
        assert self._adapter is not None, "lora_sync=adapter alone"
        from workers.rollout.vllm.vllm_lora import held_adapter

        return self._on_worker(partial(held_adapter, expected=self._adapter))

    def _with_own_layers(self, call: Callable[[Any], Any]) -> Any:
        """Run ``call`` on the worker, with vLLM's layers unwrapped from their LoRA layers and named as without an adapter."""
        if self._adapter is None:
            return self._on_worker(call)
        from workers.rollout.vllm.vllm_lora import unwrapped

        def calling(worker: Any) -> Any:
            with unwrapped(worker.model_runner.model):
                return call(worker)

        return self._on_worker(calling)

    def sleep(self) -> None:
        """Unfinished requests are kept and resume after wake and new weights.

        With an adapter the base weights move to host memory (level 1); otherwise weights are dropped (level 2): a sync follows.
        """
        self._drop_cached()
        if self._weights_awake or self._cache_awake:
            self._on_worker("sleep", level=1 if self._base_there else 2)
        self._weights_awake = self._weights_there = self._cache_awake = False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        if weights and not self._weights_awake:
            self._on_worker("wake_up", tags=["weights"])
            self._weights_awake = True
        if kv_cache and not self._cache_awake:
            self._on_worker("wake_up", tags=["kv_cache"])
            self._cache_awake = True

    def _leave_weights(self, version: int, *, keep_cache: bool) -> None:
        """Prepare requests and caches for the weights of ``version``; see load_weights."""
        if not keep_cache:
            self._drop_cached()
            return
        # A prefix is found by a hash, which includes the salt: those of the old weights are not found any more.
        self._salt = str(version)
        for running in self._running.values():
            running.stamp(self._version)
        scheduler = self.engine.engine_core.engine_core.scheduler
        for request in scheduler.waiting:
            request.cache_salt = self._salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def _drop_cached(self) -> None:
        """Invalidate the KV cache: forget prefixes, and return running requests to the queue."""
        self._salt = None
        for running in self._running.values():
            running.stamp(self._version)
        # Keys and values of old weights must not be continued with new ones: a refusal is an error.
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its prefix cache: responses would continue from keys and values of old weights")

    def _on_worker(self, method: str | Callable[[Any], Any], **kwargs: Any) -> Any:
        """Call a method of vLLM's worker, or a function of it; returns its result."""
        (result,) = self.engine.collective_rpc(method, kwargs=kwargs)
        return result

    def close(self) -> None:
        """Shut the engine down and restore the environment. Collect before empty_cache: only then is its memory unused."""
        self.engine.engine_core.shutdown()
        del self.engine
        gc.collect()
        torch.cuda.empty_cache()  # empties vLLM's memory pools: a process can hold those of one engine only
        self._opened.close()

    def stats(self) -> dict[str, float]:
        """Counters since the last call.

        cache_bytes: size of the KV cache while it is awake. A prompt counts once for each of its requests.
        """
        counters, self._counters = self._counters, self._zeros()
        return counters

    def _zeros(self) -> dict[str, float]:
        counted = ("prompt_tokens", "cached_tokens", "response_tokens", "decode_steps")
        return dict.fromkeys(counted, 0.0) | {"cache_bytes": self._cache_bytes}


def engine_arguments(spec: RolloutSpec) -> dict[str, Any]:
    """Translate the rollout configuration to vLLM's EngineArgs."""
    rollout = spec.rollout
    return {
        "model": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "hf_overrides": spec.model.override_config,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "dtype": rollout.dtype,
        "load_format": rollout.load_format,
        "seed": rollout.seed,
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",
        # On CPU vLLM has no sleep mode; vllm_cpu.SleepingWorker adds one.
        "enable_sleep_mode": spec.device == "cuda",
        # Token ids in, token ids out: all tokenizers are on the controller.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling parameters come from requests only, not from the model's directory
        "disable_log_stats": True,
        **rollout.engine_kwargs.vllm,
    }


def sampling_arguments(request: Request, max_length: int) -> dict[str, Any]:
    """Translate a request's sampling to vLLM's SamplingParams. max_length: of prompt and response together, in tokens.

    Only stop_token_ids end a response. vLLM's ignore_eos refers to the end token in the model's directory and is always true.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_tokens": min(sampling.max_tokens, max_length - len(request.prompt_ids)) - len(request.response_ids),
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "ignore_eos": True,
        # Instead of ``seed``, for which vLLM would keep a generator.
        "extra_args": {KEY: int(stream_keys([request.seed])[0]), BEGUN: len(request.response_ids)},
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }


def prepare_worker(worker: Any) -> int:
    """Replace the worker's sampler by SeededSampler, and shorten a step; returns the size of its KV cache in bytes."""
    from workers.rollout.vllm.vllm_runner import shorten_input_ids
    from workers.rollout.vllm.vllm_sampler import SeededSampler

    runner = worker.model_runner
    runner.sampler = SeededSampler(runner)
    shorten_input_ids(runner)
    return sum(cache.nbytes for cache in runner.kv_caches)


def nothing_packed(module: nn.Module, leaf: str, parts: Sequence[Any], *, exact: bool) -> list[HeldWeight]:
    """No layer computes with packed copies (CUDA)."""
    return []


def addresses(place: WorkerInfo) -> dict[str, str]:
    """Environment variables that an external launcher such as torchrun would have set."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }


def import_vllm(device: Literal["cpu", "cuda"]) -> None:
    """Import what make_engine needs, after setting the environment variables that vLLM reads on import."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with set_environment(ENVIRONMENT), fenced():
        if device == "cuda":
            from workers.rollout.vllm import vllm_cuda  # noqa: F401
        else:
            from workers.rollout.vllm import vllm_cpu

            vllm_cpu.set_environment()
        from vllm.v1.engine import llm_engine  # noqa: F401


def load_model_classes(names: Iterable[str]) -> None:
    """Import vLLM's model classes of these architectures.

    vLLM otherwise inspects them in a process of their own, to leave CUDA uninitialised, which it is not here. That process
    imports torch and vLLM: 6 s, unless vLLM's cache has the result.
    """
    from vllm import ModelRegistry

    for name in names:
        if name in ModelRegistry.models:  # others are models of transformers
            with suppress(ImportError):  # vLLM reports it, or takes the model of transformers
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def make_engine(arguments: dict[str, Any]) -> Any:
    """Build vLLM's LLMEngine. Its shutdown is replaced by leave_groups."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core
    from vllm.v1.engine.llm_engine import LLMEngine

    # Called when the engine shuts down; vLLM's own function would destroy the trainer's process group.
    core.cleanup_dist_env_and_memory = leave_groups
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def leave_groups() -> None:
    """vLLM's cleanup at the end of an engine, except that it keeps the default process group, which belongs to the trainer."""
    from vllm import envs
    from vllm.distributed import parallel_state

    envs.disable_envs_cache()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    gc.collect()
