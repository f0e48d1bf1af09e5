"""Clamp values that conflict with other keys but have an unambiguous meaning, and emit a warning.

Commands written for other systems often contain such values, for example a mini-batch larger than the batch. Values whose
intended meaning is unclear are errors instead; see configs/validation/programs.py.
"""

import os
from collections.abc import Collection
from dataclasses import asdict, replace
from math import gcd
from typing import Any, TypeVar

from configs.base.keys import ConfigError
from configs.schema.common import CUT, MegatronConfig, ShardedConfig, WorkersConfig
from configs.schema.generation import GenerationConfig
from configs.schema.placement import Pool, place
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SupervisedConfig

Config = TypeVar("Config")
Run = TypeVar("Run", bound=PPOConfig | GenerationConfig)
Training = TypeVar("Training", bound=PPOConfig | SupervisedConfig)
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def within_bounds(config: Config, typed: Collection[str] = ()) -> tuple[Config, list[str]]:
    """``config`` with clamped values, and one warning for each of them. typed: keys on the command line."""
    notes: list[str] = []
    cut: Any = config
    if isinstance(cut, PPOConfig):
        cut = _cuts(_mini_batches(cut, notes), notes)
    if isinstance(cut, PPOConfig | SupervisedConfig):
        cut = _copies(cut, notes)
    if isinstance(cut, PPOConfig | GenerationConfig):
        cut = _lengths(cut, notes)
        if TENSOR_PARALLEL not in typed:
            cut = _engine_size(cut, notes)
    return cut, notes


def _mini_batches(config: PPOConfig, notes: list[str]) -> PPOConfig:
    """Clamp mini-batches larger than the batch, so that one update uses the whole batch."""
    batch, actor, critic = config.data.train_batch_size, config.actor_rollout_ref.actor, config.critic
    ending = f"larger than data.train_batch_size={batch}; one update uses the whole batch"
    if actor.ppo_mini_batch_size > batch:
        notes.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: {ending}")
        models = replace(config.actor_rollout_ref, actor=replace(actor, ppo_mini_batch_size=batch))
        config = replace(config, actor_rollout_ref=models)
    if critic.ppo_mini_batch_size > batch:
        # By default the critic's key is an interpolation of the actor's: one warning is enough for both.
        if critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
            notes.append(f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size}: {ending}")
        config = replace(config, critic=replace(critic, ppo_mini_batch_size=batch))
    return config


def _cuts(config: PPOConfig, notes: list[str]) -> PPOConfig:
    """Use the actor's parallel sizes for all Megatron roles that share its GPUs.

    Megatron's process groups are global to a process, so roles in one process cannot differ. Replacing the sizes is safe: how a
    model is split does not change results.
    """
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    if config.placement.rule != "colocate_all" or actor.strategy != "megatron":
        return config
    of_actor = asdict(actor.megatron)
    cuts = {name: of_actor[name] for name in CUT}

    def like_actor(key: str, role: ShardedConfig) -> MegatronConfig:
        own = asdict(role.megatron)
        notes.extend(
            f"{key}.megatron.{name}={own[name]}: models that share GPUs must be split the same way, and the actor uses "
            f"{cuts[name]}"
            for name in CUT
            if own[name] != cuts[name]
        )
        return replace(role.megatron, **cuts)

    if ref.strategy == "megatron":
        models = replace(config.actor_rollout_ref, ref=replace(ref, megatron=like_actor("actor_rollout_ref.ref", ref)))
        config = replace(config, actor_rollout_ref=models)
    if critic.strategy == "megatron":
        config = replace(config, critic=replace(critic, megatron=like_actor("critic", critic)))
    return config


def _copies(config: Training, notes: list[str]) -> Training:
    """Disable remote copies whose destination is the run directory itself."""
    trainer: Any = config.trainer
    copies = trainer.checkpoint.remote_dir
    if copies is None or os.path.abspath(copies.removeprefix("file://")) != os.path.abspath(trainer.default_local_dir):
        return config
    notes.append(f"trainer.checkpoint.remote_dir={copies}: is the run directory; no copies are made")
    return replace(config, trainer=replace(trainer, checkpoint=replace(trainer.checkpoint, remote_dir=None)))


def _lengths(config: Run, notes: list[str]) -> Run:
    """Clamp the prompt length to the engine's max_model_len, which also truncates responses."""
    data: Any = config.data
    longest = config.actor_rollout_ref.rollout.max_model_len
    if longest is None or longest >= data.max_prompt_length + data.max_response_length:
        return config
    key = f"actor_rollout_ref.rollout.max_model_len={longest}"
    notes.append(
        f"{key}: less than data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + "
        f"{data.max_response_length}; responses are truncated at this total length"
    )
    # A prompt must leave room for at least one generated token.
    if 1 < longest <= data.max_prompt_length:
        notes.append(f"{key}: data.max_prompt_length={data.max_prompt_length} is reduced to {longest - 1} tokens")
        config = replace(config, data=replace(data, max_prompt_length=longest - 1))
    return config


def _engine_size(config: Run, notes: list[str]) -> Run:
    """Reduce a tensor parallel size that was not typed to one that divides the GPUs of the engines."""
    rollout: Any = config.actor_rollout_ref.rollout
    pool: WorkersConfig | Pool = config.trainer
    if isinstance(config, PPOConfig):
        try:
            # Whether there is a critic is known after the validation alone, which reports sizes that do not fit then.
            pool = place(config.placement, config.trainer, {"actor", "rollout"}).pool("rollout")
        except ConfigError:  # pools that do not fit: reported by the validation
            return config
    # An SGLang engine is within a node.
    gpus = pool.n_gpus_per_node if rollout.name == "sglang" else pool.nnodes * pool.n_gpus_per_node
    size = rollout.tensor_model_parallel_size
    fits = gcd(size, gpus)
    if rollout.name == "embedded" or fits == size:
        return config
    count = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    notes.append(f"{TENSOR_PARALLEL}={size}: the default does not divide the {count} of the engines; {fits} is used")
    models: Any = config.actor_rollout_ref
    return replace(config, actor_rollout_ref=replace(models, rollout=replace(rollout, tensor_model_parallel_size=fits)))
