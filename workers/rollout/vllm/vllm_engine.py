"""The vLLM engine in the worker's own process, beside the trainer's shards; the same code on CUDA and on CPU.

Every rank makes an engine («external launcher»). The ranks of a replica get the same requests in the same order, so they
schedule alike and need not talk about it. What CPU alone needs is in workers/rollout/vllm/vllm_cpu.py, what CUDA
alone in vllm_cuda.py.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from workers.controller.environment import set_environment
from workers.controller.group import WorkerInfo
from workers.engine.hf.hf_model import DTYPES, empty_model, model_config, vocab_size
from workers.rollout.base import Completion, EngineAsleep, Request, Rollout, RolloutSpec, check_requests
from workers.rollout.sampling import stream_keys
from workers.rollout.sync.expected_weights import ExpectedWeights
from workers.rollout.sync.hf_names import FileNames
from workers.rollout.verification import HeldWeight
from workers.rollout.vllm.rng import KEY, fenced

if TYPE_CHECKING:
    from peft import LoraConfig

    from workers.rollout.vllm.vllm_lora import ExpectedAdapter

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has another sampler than SeededSampler fits
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(slots=True)
class RunningAnswer:
    """A request, its name within vLLM, and what there is of the answer."""

    request: Request
    name: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class VLLMRollout(Rollout):
    takes_driver_memory = True
    _fenced: Callable[[], AbstractContextManager[None]]
    _packed: Callable[..., list[HeldWeight]]
    _adapter: ExpectedAdapter | None = None
    _base_there = False
    """The weights that an adapter is beside; they outlive sleep."""

    def __init__(self, spec: RolloutSpec, place: WorkerInfo) -> None:
        """Collective over all ranks: the process group of the trainer is there, and vLLM's groups are made of its ranks."""
        self.tensor_parallel_size = spec.rollout.tensor_model_parallel_size
        self.max_length = spec.max_model_len
        self._dtype = DTYPES[spec.rollout.dtype]
        model = empty_model(spec.model, model_config(spec.model, "lm"), "lm", self._dtype).hf
        self._file_names = FileNames(model)
        self.expected = ExpectedWeights(dict(self.in_its_names(model.state_dict(keep_vars=True).items())))
        self.vocab_size = vocab_size(spec.model)
        arguments = engine_arguments(spec)
        import_vllm(spec.device)
        with ExitStack() as opening:
            opening.enter_context(set_environment(ENVIRONMENT | addresses(place)))
            self._fenced, self._packed = fenced, nothing_packed
            if spec.rollout.lora_sync == "adapter" and spec.model.has_adapter:
                from workers.rollout.vllm.vllm_lora import ExpectedAdapter

                self._adapter, self.keeps_weights = ExpectedAdapter(spec.model), True
                arguments |= self._adapter.arguments()
            if spec.device == "cuda":
                from workers.rollout.vllm import vllm_cuda

                arguments = vllm_cuda.completed(arguments)
            else:
                from workers.rollout.vllm import vllm_cpu

                vllm_cpu.set_environment()
                arguments = vllm_cpu.completed(arguments, spec, model, place)
                self._fenced, self._packed = vllm_cpu.fenced_uncompiled, vllm_cpu.packed_weight
            with self._fenced():
                self.engine = make_engine(arguments)
                self._cache_bytes = float(self._on_worker(prepare_worker))
            self._opened = opening.pop_all()
        gc.unfreeze()  # vLLM takes all objects of the process, the trainer's too, from the garbage collector
        self._answers: dict[str, RunningAnswer] = {}
        """Unfinished ones by vLLM's names, in order of submission."""
        self._counters = self._zeros()

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        unfinished = {answer.request.id for answer in self._answers.values()}
        check_requests(requests, unfinished, max_length=self.max_length, vocab_size=self.vocab_size)
        processor, tasks = self.engine.input_processor, self.engine.get_supported_tasks()
        for request in requests:
            params = SamplingParams(**sampling_arguments(request, self.max_length), output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            asked = processor.process_inputs(str(request.id), prompt, params, supported_tasks=tasks)
            processor.assign_request_id(asked)
            self.engine.engine_core.add_request(asked)
            self._answers[asked.request_id] = RunningAnswer(request, asked.request_id)
            self._counters["prompt_tokens"] += len(request.prompt_ids)

    @property
    def unfinished(self) -> int:
        return len(self._answers)

    def step(self) -> list[Completion]:
        """Raises FloatingPointError, naming a request, where the model's logits are not finite.

        What the engine's core gives is taken as it is: vLLM's own collector makes objects of each token's log-prob, which
        for hundreds of answers takes as long as the rest of a step.
        """
        self._check_awake()
        if not self._answers:
            return []
        with self._fenced():
            outputs = self.engine.engine_core.get_output().outputs
        self._counters["decode_steps"] += 1
        ended = []
        for output in outputs:
            answer = self._answers[output.request_id]
            answer.token_ids += output.new_token_ids
            answer.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.prefill_stats is not None:
                self._counters["cached_tokens"] += output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                del self._answers[answer.name]
                ended.append(self._completion(answer, str(output.finish_reason)))
        return ended

    def _completion(self, answer: RunningAnswer, reason: Any) -> Completion:
        id, values = answer.request.id, tuple(answer.log_probs)
        if not all(map(math.isfinite, values)):
            raise FloatingPointError(f"request {id}: the model's logits are not finite (weights of version {self._version})")
        self._counters["response_tokens"] += len(values)
        return Completion(id, tuple(answer.token_ids), values, reason, self._version)

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """In order of submission. An id that is not unfinished is passed over: it may have ended meanwhile."""
        chosen = [answer for answer in self._answers.values() if ids is None or answer.request.id in ids]
        self.engine.engine_core.abort_requests([answer.name for answer in chosen])
        for answer in chosen:
            del self._answers[answer.name]
        return [self._completion(answer, "abort") for answer in chosen]

    # Weights and memory

    def in_its_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self._file_names.split(weights)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises ValueError, naming weights that are missing, unexpected or of another shape; the engine then has none.

        vLLM takes them one after the other, cuts out this rank's part and casts it. Running answers wait for the new weights:
        what they have is kept, and computed anew. Those that an adapter is beside are nothing without it.
        """
        self._check_takes_weights("load_weights")
        self._weights_there = self._base_there = False
        self._drop_cached()
        came: dict[str, torch.Size] = {}
        with self._fenced(), torch.no_grad():
            fitting = self.expected.fitting(weights, came)
            self._with_own_layers(lambda worker: worker.reload_weights(weights_iterator=fitting))
        self.expected.check(came)
        self._weights_there, self._base_there, self._version = self._adapter is None, self._adapter is not None, version

    def load_adapter(self, config: LoraConfig, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises ValueError, naming weights that are missing, unexpected or of another shape, and EngineAsleep if there are no
        weights that it could be beside; the engine then has none. Running answers go on as with other new weights."""
        self._check_takes_weights("load_adapter")
        assert self._adapter is not None, "lora_sync=adapter alone"
        if not self._base_there:
            raise EngineAsleep("load_adapter: the engine has no weights that it could be beside; call load_weights")
        from workers.rollout.vllm.vllm_lora import replace_adapter

        self._weights_there = False
        self._drop_cached()
        came: dict[str, torch.Size] = {}
        expected = self._adapter.weights
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
        """``call`` on the worker, with vLLM's layers as they are without an adapter."""
        if self._adapter is None:
            return self._on_worker(call)
        from workers.rollout.vllm.vllm_lora import unwrapped

        def calling(worker: Any) -> Any:
            with unwrapped(worker.model_runner.model):
                return call(worker)

        return self._on_worker(calling)

    def sleep(self) -> None:
        """Unfinished requests stay, and go on where they are once the engine works again. Weights that an adapter is beside wait
        in the host's memory."""
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

    def _drop_cached(self) -> None:
        """Nothing in the cache counts any more: prefixes are forgotten, running answers go back to the queue."""
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its prefix cache: answers would go on from keys and values of old weights")

    def _on_worker(self, method: str | Callable[[Any], Any], **kwargs: Any) -> Any:
        (result,) = self.engine.collective_rpc(method, kwargs=kwargs)
        return result

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.engine
        gc.collect()
        torch.cuda.empty_cache()  # so that vLLM's pools, of which a process can have one engine's, are empty
        self._opened.close()

    def stats(self) -> dict[str, float]:
        """cache_bytes: what the KV cache takes while it is awake; a prompt counts for each request that has it."""
        counters, self._counters = self._counters, self._zeros()
        return counters

    def _zeros(self) -> dict[str, float]:
        counted = ("prompt_tokens", "cached_tokens", "response_tokens", "decode_steps")
        return dict.fromkeys(counted, 0.0) | {"cache_bytes": self._cache_bytes}


def engine_arguments(spec: RolloutSpec) -> dict[str, Any]:
    """Our keys as arguments of vLLM's EngineArgs."""
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
        "enable_sleep_mode": spec.device == "cuda",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is what a request says, nothing from the model's directory
        "disable_log_stats": True,
        **rollout.engine_kwargs.vllm,
    }


def sampling_arguments(request: Request, max_length: int) -> dict[str, Any]:
    """A request's sampling as arguments of vLLM's SamplingParams. max_length: prompt and response together, tokens.

    stop_token_ids alone end an answer: ignore_eos stands for the end token that vLLM would find in the model's directory.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_tokens": min(sampling.max_tokens, max_length - len(request.prompt_ids)),
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "ignore_eos": True,
        "extra_args": {KEY: int(stream_keys([request.seed])[0])},  # with a seed vLLM would keep a generator for it
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
    }


def prepare_worker(worker: Any) -> int:
    """Put our sampler into it. The bytes of its KV cache."""
    from workers.rollout.vllm.vllm_sampler import SeededSampler

    runner = worker.model_runner
    runner.sampler = SeededSampler(runner)
    return sum(cache.nbytes for cache in runner.kv_caches)


def nothing_packed(module: nn.Module, leaf: str, parts: Sequence[Any], *, exact: bool) -> list[HeldWeight]:
    """Parameters are what vLLM computes with."""
    return []


def addresses(place: WorkerInfo) -> dict[str, str]:
    """What an external launcher would have said in the environment."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }


def import_vllm(device: Literal["cpu", "cuda"]) -> None:
    """What make_engine will load. Before, whatever has to be said in the environment by then."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with set_environment(ENVIRONMENT), fenced():
        if device == "cuda":
            from workers.rollout.vllm import vllm_cuda  # noqa: F401
        else:
            from workers.rollout.vllm import vllm_cpu

            vllm_cpu.set_environment()
        from vllm.v1.engine import llm_engine  # noqa: F401


def make_engine(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core
    from vllm.v1.engine.llm_engine import LLMEngine

    core.cleanup_dist_env_and_memory = leave_groups
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def leave_groups() -> None:
    """What vLLM does when an engine ends, but for destroying the process group, which is the trainer's."""
    from vllm import envs
    from vllm.distributed import parallel_state

    envs.disable_envs_cache()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    gc.collect()
