"""Build rollout engines: engine specification, weight source, sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from configs.schema.common import FSDPConfig, ModelConfig, Sharding
from configs.schema.ppo import PromptConfig, RolloutEngineConfig, SamplingConfig
from trainer.cluster.remote import RemoteModel
from trainer.cluster.role_builder import start_model
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import stop_token_ids
from trainer.rollout.remote_rollout import RemoteRollout
from workers.controller.group import WorkerGroup
from workers.engine.hf.hf_model import vocab_size
from workers.plan import Limits
from workers.rollout.base import RolloutSpec, Sampling
from workers.seeding import seed_of

FORWARD_TOKENS = 8192  # tokens per micro-batch; bounds the memory of activations


def rollout_spec(
    model: ModelConfig,
    rollout: RolloutEngineConfig,
    data: PromptConfig,
    device: Literal["cpu", "cuda"],
    run_dir: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> RolloutSpec:
    """Specification of the rollout engine. run_dir: None for a program without a run directory. tokenizer: see RolloutSpec."""
    max_model_len = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    absolute_run_dir = None if run_dir is None else run_dir.absolute()
    return RolloutSpec(model, rollout, max_model_len, device, absolute_run_dir, tokenizer)


def start_weight_source(
    workers: WorkerGroup, spec: RolloutSpec, watchdog: Watchdog, *, sharding: Sharding, seed: int
) -> RemoteModel:
    """Build an untrained «actor» role, the source of the weights of the engine of ``spec``."""
    return start_model(
        workers,
        "actor",
        model=spec.model,
        head="lm",
        sharding=sharding,
        device=spec.device,
        seed=seed_of(seed, "actor"),
        # At least max_model_len: a row that alone exceeds max_tokens is an error.
        forward_limits=Limits(max_tokens=max(spec.max_model_len, FORWARD_TOKENS)),
        training=None,
        watchdog=watchdog,
    )


def start_engine(workers: WorkerGroup, spec: RolloutSpec, watchdog: Watchdog, *, seed: int) -> RemoteRollout:
    """Start the engine of ``spec`` on every worker and load the model's weights from a colocated, untrained role."""
    dtype = spec.rollout.dtype
    # The source holds the weights in the engine's dtype and leaves the device after the sync, when only the engine needs memory.
    fsdp = FSDPConfig(
        model_dtype=dtype,
        dtype=dtype,
        reshard_after_forward=True,
        use_no_sync_for_gradient_accumulation=False,
        use_torch_compile=False,
        param_offload=True,
        optimizer_offload=False,
        fsdp_size=-1,
        ulysses_sequence_parallel_size=1,
    )
    start_weight_source(workers, spec, watchdog, sharding=fsdp, seed=seed)
    rollout = RemoteRollout(workers, spec, "actor", watchdog)
    rollout.sync_weights(0)
    return rollout


def sampling(
    rollout: RolloutEngineConfig, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: PromptConfig
) -> Sampling:
    """Sampling parameters of training; greedy if rollout.do_sample is false."""
    return Sampling(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_tokens=data.max_response_length,
        stop_token_ids=stop_token_ids(tokenizer, model),
        ignore_eos=rollout.ignore_eos,
    )


def end_tokens(asked: Sampling, model: ModelConfig) -> int:
    """Number of stop tokens that the model can generate.

    A tokenizer class may define an EOS token outside the vocabulary of a model whose files name none.
    """
    return sum(token < vocab_size(model) for token in asked.stop_token_ids)


def validation_sampling(training: Sampling, chosen: SamplingConfig) -> Sampling:
    """Sampling parameters of training with the overrides of rollout.val_kwargs."""
    temperature = chosen.temperature if chosen.do_sample else 0.0
    return replace(training, temperature=temperature, top_k=chosen.top_k, top_p=chosen.top_p)
