"""Build reward models from the configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from configs.reward_models import model_key, reward_models
from configs.schema.common import ModelConfig, TiledMLPConfig, TokenizedModelConfig, WorkersConfig
from configs.schema.ppo import ModelScoringConfig, has_score
from configs.schema.scoring_model import ScoringModelConfig
from configs.validation.batches import scoring_cut
from configs.validation.rollout import Workers
from trainer.algorithms.moments import RunningMoments
from trainer.cluster.role_builder import limits, start_model
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.rewards.conversations import Conversations, same_tokenizer, with_template
from trainer.rewards.models.local_model import LocalModel
from trainer.rewards.models.reward_models import STATISTICS, Moments, RewardModel, RewardModels, ServedModel
from trainer.rewards.remote.remote_rewards import RemoteRewards
from workers.controller.group import WorkerGroup
from workers.engine.base import Head
from workers.engine.hf.hf_model import model_config, model_files
from workers.roles.train_engines import check_engine
from workers.seeding import seed_of

HEADS = ("score", "classifier")
"""Names of classifier heads in transformers."""


def check_reward_models(reward: ModelScoringConfig, trainer: WorkersConfig) -> None:
    """Check the models before any process starts. Raises ValueError, one line, for a missing file or score head."""
    for name, config in reward_models(reward).items():
        if config.urls:
            continue
        check_one(model_key(name, reward), config, trainer)


def check_one(key: str, config: ScoringModelConfig, trainer: WorkersConfig) -> None:
    """Check one reward model; see check_reward_models."""
    try:
        check_head(engine_model(config))
        stored(config)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{key}: {error}") from error
    check_engine(key, config, engine_model(config), head_of(config), trainer.device)


def check_head(model: ModelConfig) -> None:
    """Raise ValueError for a model without a score head of one label."""
    # transformers initialises a missing head randomly, with a warning at most: the run would train on noise. The weight files
    # are checked, not config.json, which promises a head even if the weights were exported without it.
    made = (model_config(model, "reward").architectures or ["a model"])[0]
    names = {name for file in Path(model_files(model)).glob("*.safetensors") for name in tensor_names(file)}
    if not any(name.endswith(".weight") and name.split(".")[0] in HEADS for name in names):
        raise ValueError(
            f"model.path={model.path}: {made} has no score head (no {HEADS[0]}.weight or {HEADS[1]}.weight), so it is not a "
            "reward model; use one, or train one from a language model with trainer.main_reward_model"
        )


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, from its header only."""
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def start_reward_models(
    reward: ModelScoringConfig,
    group: WorkerGroup,
    workers: Workers,
    trainer: WorkersConfig,
    watchdog: Watchdog,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict,
) -> RewardModels | None:
    """Start all configured reward models; None if there are none.

    workers: layout of ``group``. tokenizer, template_kwargs: the policy's. Raises ValueError, one line, for a missing tokenizer
    or template, and for kind=token with a tokenizer other than the policy's.
    """
    models = []
    # In the order of the configuration, which is the order of their metrics and of the sum of floating-point scores.
    for name, config in reward_models(reward).items():
        if config.urls:
            servers = RemoteRewards(config.urls, reward.remote, key=f"{model_key(name, reward)}.urls")
            models.append(ask_servers(name, config, servers, tokenizer, watchdog))
            continue
        try:
            conversations = own_conversations(config, tokenizer, template_kwargs)
        except ValueError as error:
            raise ValueError(f"{model_key(name, reward)}: {error}") from error
        models.append(start_one(name, config, conversations, group, workers, trainer, watchdog))
    if not models:
        return None
    uses_workers = any(not model.config.urls for model in models)
    workers_of_models = group if uses_workers else None
    return RewardModels(models, rule_weight=reward.weight, asks_rules=has_score(reward), group=workers_of_models)


def start_one(
    name: str,
    config: ScoringModelConfig,
    conversations: Conversations | None,
    group: WorkerGroup,
    workers: Workers,
    trainer: WorkersConfig,
    watchdog: Watchdog,
) -> RewardModel:
    """Start one reward model on the workers."""
    model, head = engine_model(config), head_of(config)
    forward_limits = limits(scoring_cut(f"reward/{name}", config, workers))
    remote = start_model(
        group,
        f"reward/{name}",
        model=model,
        head=head,
        sharding=config.sharding,
        device=trainer.device,
        seed=seed_of(trainer.seed, "reward"),
        forward_limits=forward_limits,
        training=None,
        watchdog=watchdog,
    )
    # Rows are never split over micro-batches, so the cap on their tokens is a limit of the row's length too.
    bounds = [bound for bound in (config.max_length, forward_limits.max_tokens) if bound is not None]
    vocabulary = int(model_config(model, head).get_text_config().vocab_size)
    scorer = LocalModel(name, config, remote, conversations, longest=min(bounds) if bounds else None, vocabulary=vocabulary)
    moments = RunningMoments() if config.normalize == "running" else stored(config)
    return RewardModel(name, config, scorer, moments)


def ask_servers(
    name: str, config: ScoringModelConfig, servers: RemoteRewards, tokenizer: PreTrainedTokenizerBase, watchdog: Watchdog
) -> RewardModel:
    """Connect to the servers of one reward model. Raises ValueError if none accepts a connection."""
    with watchdog.own("start", f"reward model {name}", ", ".join(config.urls)):
        servers.wait_ready()
    moments = RunningMoments() if config.normalize == "running" else None
    return RewardModel(name, config, ServedModel(name, servers, tokenizer, watchdog), moments)


def own_conversations(
    config: ScoringModelConfig, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict
) -> Conversations | None:
    """Encoder of conversations for the reward model; None if it reads the policy's tokens."""
    # The policy's tokens are preferred: decoding and encoding again does not always give the sampled tokens back.
    own = with_template(load_tokenizer(engine_model(config)), config.chat_template)
    if same_tokenizer(own, tokenizer) and config.apply_chat_template_kwargs in ({}, template_kwargs):
        return None
    if config.kind == "token":
        raise ValueError(
            f"kind=token: the policy's tokens are rewarded, and the tokenizer of {own.name_or_path} or its chat template "
            "differs from the policy's; kind=sequence supports any tokenizer"
        )
    return Conversations(own, config.apply_chat_template_kwargs)


def stored(config: ScoringModelConfig) -> Moments | None:
    """Stored mean and standard deviation of the model's scores; None without normalize=stored.

    They are read from a file in the model's directory, or from config.json, where OpenRLHF writes them. Raises ValueError if they
    are missing or not usable.
    """
    if config.normalize != "stored":
        return None
    directory = Path(model_files(engine_model(config)))
    file = directory / STATISTICS if (directory / STATISTICS).is_file() else directory / "config.json"
    statistics = json.loads(file.read_text(encoding="utf-8"))
    if not {"mean", "std"} <= statistics.keys():
        raise ValueError(f"normalize=stored: no {STATISTICS} in {config.path}; trainer.main_reward_model writes it")
    mean, std = statistics["mean"], statistics["std"]
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"normalize=stored: {file} has mean {mean} and std {std}; both must be finite, and std above 0")
    return Moments(mean, std)


def head_of(config: ScoringModelConfig) -> Head:
    """Head of the model: a value head has one output per token, a reward head one per sequence."""
    return "reward" if config.kind == "sequence" else "value"


def engine_model(config: ScoringModelConfig) -> TokenizedModelConfig:
    """Model configuration for the engine, of a role that is never trained."""
    assert config.path is not None, "see configs.reward_models"
    return TokenizedModelConfig(
        path=config.path,
        tokenizer_path=config.tokenizer_path,
        custom_chat_template=None,
        trust_remote_code=config.trust_remote_code,
        enable_gradient_checkpointing=False,
        enable_activation_offload=False,
        tiled_mlp=TiledMLPConfig(enabled=False, num_shards=1),
        override_config=config.override_config,
        lora_rank=0,
        lora_alpha=1.0,
        target_modules="all-linear",
        lora_adapter_path=None,
        router_aux_loss_coef=0.0,
    )
