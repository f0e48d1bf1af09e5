"""Values that do not go with others, and can mean but one thing: they become that, with a note."""

import os
from dataclasses import asdict, replace
from typing import Any, TypeVar

from configs.checks_megatron import CUT
from configs.schema.common import MegatronConfig, ShardedConfig
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.schema.reward_model import RewardModelConfig
from configs.schema.sft import SFTConfig

Config = TypeVar("Config")
Run = TypeVar("Run", bound=PPOConfig | GenerationConfig)
Training = TypeVar("Training", bound=PPOConfig | SFTConfig | RewardModelConfig)


def within_bounds(config: Config) -> tuple[Config, list[str]]:
    """``config``, with lines for the user about what was cut."""
    notes: list[str] = []
    cut: Any = config
    if isinstance(cut, PPOConfig):
        cut = _cuts(_mini_batches(cut, notes), notes)
    if isinstance(cut, PPOConfig | SFTConfig | RewardModelConfig):
        cut = _copies(cut, notes)
    if isinstance(cut, PPOConfig | GenerationConfig):
        cut = _lengths(cut, notes)
    return cut, notes


def _mini_batches(config: PPOConfig, notes: list[str]) -> PPOConfig:
    """Of more than a batch: one update takes the whole batch."""
    batch, actor, critic = config.data.train_batch_size, config.actor_rollout_ref.actor, config.critic
    ending = f"more than data.train_batch_size={batch}; one update takes the whole batch"
    if actor.ppo_mini_batch_size > batch:
        notes.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: {ending}")
        models = replace(config.actor_rollout_ref, actor=replace(actor, ppo_mini_batch_size=batch))
        config = replace(config, actor_rollout_ref=models)
    if critic.ppo_mini_batch_size > batch:
        if critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:  # which it follows, if nothing else is said
            notes.append(f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size}: {ending}")
        config = replace(config, critic=replace(critic, ppo_mini_batch_size=batch))
    return config


def _cuts(config: PPOConfig, notes: list[str]) -> PPOConfig:
    """Where all roles share GPUs, Megatron's process groups are the actor's. How a model is cut changes no number."""
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    if config.placement.layout != "colocate_all" or actor.strategy != "megatron":
        return config
    of_actor = asdict(actor.megatron)
    cuts = {name: of_actor[name] for name in CUT}

    def like_actor(key: str, role: ShardedConfig) -> MegatronConfig:
        own = asdict(role.megatron)
        notes.extend(
            f"{key}.megatron.{name}={own[name]}: models that share GPUs are cut alike, and the actor's has {cuts[name]}"
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
    """None of the run directory to itself."""
    trainer: Any = config.trainer
    copies = trainer.checkpoint.remote_dir
    if copies is None or os.path.abspath(copies.removeprefix("file://")) != os.path.abspath(trainer.default_local_dir):
        return config
    notes.append(f"trainer.checkpoint.remote_dir={copies}: is the run directory itself; nothing is copied")
    return replace(config, trainer=replace(trainer, checkpoint=replace(trainer.checkpoint, remote_dir=None)))


def _lengths(config: Run, notes: list[str]) -> Run:
    """An engine's max_model_len ends answers; a prompt must leave room for one token."""
    data: Any = config.data
    longest = config.actor_rollout_ref.rollout.max_model_len
    if longest is None or longest >= data.max_prompt_length + data.max_response_length:
        return config
    key = f"actor_rollout_ref.rollout.max_model_len={longest}"
    notes.append(
        f"{key}: less than data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + "
        f"{data.max_response_length}; an answer ends where prompt and answer are so long"
    )
    if 1 < longest <= data.max_prompt_length:
        notes.append(f"{key}: with data.max_prompt_length={data.max_prompt_length} prompts are {longest - 1} tokens at most")
        config = replace(config, data=replace(data, max_prompt_length=longest - 1))
    return config
