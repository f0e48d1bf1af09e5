"""The vLLM engine in the worker's own process, beside the trainer's shards; the same code on CUDA and on CPU.

Every rank makes an engine («external launcher»). The ranks of a replica get the same requests in the same order, so they
schedule alike and need not talk about it. What CPU alone needs is in workers/rollout/vllm_cpu.py, what CUDA
alone in vllm_cuda.py.
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.controller.group import WorkerInfo
from workers.controller.session import set_environment
from workers.engine.hf_model import DTYPES, empty_model, model_config, vocab_size
from workers.rollout.base import Completion, Request, Rollout, RolloutSpec, check_requests
from workers.rollout.sampling import draw, rows_at_once, stream_keys, uniforms
from workers.rollout.verification import HeldWeight
from workers.rollout.weights import ExpectedWeights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has another sampler than SeededDraws fits
    "VLLM_NO_USAGE_STATS": "1",
}
KEY = "tandem_key"  # among a request's extra_args: where its draws start


class VLLMRollout(Rollout):
    _fenced: Callable[[], AbstractContextManager[None]]
    _packed: Callable[..., HeldWeight | None]

    def __init__(self, spec: RolloutSpec, place: WorkerInfo) -> None:
        """Collective over all ranks: the process group of the trainer is there, and vLLM's groups are made of its ranks."""
        self.tensor_parallel_size = spec.rollout.tensor_model_parallel_size
        self.max_length = spec.max_model_len
        self._dtype = DTYPES[spec.rollout.dtype]
        model = empty_model(spec.model, model_config(spec.model, "lm"), "lm", self._dtype).hf
        self.expected = ExpectedWeights(model)
        self.vocab_size = vocab_size(spec.model)
        arguments = engine_arguments(spec)
        with ExitStack() as opening:
            opening.enter_context(set_environment(ENVIRONMENT | addresses(place)))
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            self._fenced, self._packed = fenced, nothing_packed
            if spec.device == "cuda":
                from workers.rollout import vllm_cuda

                arguments = vllm_cuda.completed(arguments)
            else:
                from workers.rollout import vllm_cpu

                vllm_cpu.set_environment()
                arguments = vllm_cpu.completed(arguments, spec, model, place)
                self._fenced, self._packed = vllm_cpu.fenced_uncompiled, vllm_cpu.packed_weight
            with self._fenced():
                self.engine = make_engine(arguments)
                self._cache_bytes = float(self._on_worker(prepare_worker))
            self._opened = opening.pop_all()
        gc.unfreeze()  # vLLM takes all objects of the process, the trainer's too, from the garbage collector
        self._requests: dict[int, tuple[Request, str]] = {}
        self._counters = self._zeros()

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_requests(requests, self._requests, max_length=self.max_length, vocab_size=self.vocab_size)
        for request in requests:
            params = SamplingParams(**sampling_arguments(request, self.max_length), output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            self._requests[request.id] = request, self.engine.add_request(str(request.id), prompt, params)
            self._counters["prompt_tokens"] += len(request.prompt_ids)

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def step(self) -> list[Completion]:
        """Raises FloatingPointError, naming a request, where the model's logits are not finite."""
        self._check_awake()
        if not self._requests:
            return []
        with self._fenced():
            outputs = self.engine.step()
        self._counters["decode_steps"] += 1
        return [self._finished(output) for output in outputs if output.finished]

    def _finished(self, output: Any) -> Completion:
        request, _ = self._requests.pop(int(output.request_id))
        self._counters["cached_tokens"] += output.num_cached_tokens
        answer = output.outputs[0]
        return self._completion(request, answer.token_ids, answer.logprobs, answer.finish_reason)

    def _completion(self, request: Request, token_ids: Sequence[int], log_probs: Sequence[Any], reason: Any) -> Completion:
        values = tuple(of_tokens[token].logprob for token, of_tokens in zip(token_ids, log_probs, strict=True))
        if not all(map(math.isfinite, values)):
            raise FloatingPointError(
                f"request {request.id}: the model's logits are not finite (weights of version {self._version})"
            )
        self._counters["response_tokens"] += len(values)
        return Completion(request.id, tuple(token_ids), values, reason, self._version)

    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """In order of submission. An id that is not unfinished is passed over: it may have ended meanwhile."""
        chosen = [id for id in self._requests if ids is None or id in ids]
        states = self.engine.output_processor.request_states
        parts = []
        for id in chosen:
            request, internal = self._requests[id]
            state = states[internal]
            parts.append((request, list(state.detokenizer.output_token_ids), list(state.logprobs_processor.logprobs)))
        self.engine.abort_request([str(id) for id in chosen])
        for id in chosen:
            del self._requests[id]
        return [self._completion(*part, "abort") for part in parts]

    # Weights and memory

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises ValueError, naming weights that are missing, unexpected or of another shape; the engine then has none.

        vLLM takes them one after the other, cuts out this rank's part and casts it. Running answers wait for the new weights:
        what they have is kept, and computed anew.
        """
        self._check_takes_weights("load_weights")
        self._weights_there = False
        self._drop_cached()
        came: dict[str, torch.Size] = {}
        with self._fenced(), torch.no_grad():
            self._on_worker("reload_weights", weights_iterator=self.expected.fitting(weights, came))
        self.expected.check(came)
        self._weights_there, self._version = True, version

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        from workers.rollout.vllm_weights import held_weights

        packed = partial(self._packed, exact=exact)
        return self._on_worker(
            lambda worker: held_weights(worker.model_runner.model, self.expected.first_name, self._dtype, packed)
        )

    def sleep(self) -> None:
        """Unfinished requests stay, and go on where they are once the engine works again."""
        self._drop_cached()
        if self._weights_awake or self._cache_awake:
            self._on_worker("sleep", level=2)
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


class SeededDraws(nn.Module):
    """Stands for vLLM's top-k and top-p sampler: all rows at once, by seed and position, whose draws are the embedded engine's.

    vLLM's own take a generator for each request, and a call for each generator. Log-probs are of the whole vocabulary.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(self, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits (n, V), divided by the temperature already, overwritten. Tokens (n,) and log-probs (n, V)."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        logits = apply_top_k_top_p(logits, top_k, top_p)
        uniform = to_device(self._uniforms(), logits.device)
        tokens = [draw(logits[rows].softmax(-1), uniform[rows]) for rows in rows_at_once(logits)]
        return torch.cat(tokens)[:, 0], log_probs

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


def prepare_worker(worker: Any) -> int:
    """Put SeededDraws into the worker's sampler. The bytes of its KV cache."""
    runner = worker.model_runner
    runner.sampler.topk_topp_sampler = SeededDraws(runner)
    return sum(cache.nbytes for cache in runner.kv_caches)


def nothing_packed(module: nn.Module, parts: Sequence[Any], *, exact: bool) -> None:
    """Parameters are what vLLM computes with."""


def addresses(place: WorkerInfo) -> dict[str, str]:
    """What an external launcher would have said in the environment."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }


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


@contextmanager
def fenced() -> Iterator[None]:
    """vLLM seeds and draws from the global generators, and on CPU replaces torch.set_num_threads: the trainer sees none of it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
