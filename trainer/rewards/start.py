"""From a configuration to reward models that can score."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from configs.checks_rollout import Workers
from configs.reward_models import model_key, reward_models
from configs.rules import has_score
from configs.schema.common import ModelConfig, TiledMLPConfig, TokenizedModelConfig, WorkersConfig
from configs.schema.ppo import ModelScoringConfig
from configs.schema.scoring_model import ScoringModelConfig
from trainer.algorithms.moments import RunningMoments
from trainer.data.chat import load_tokenizer
from trainer.data.conversations import Conversations, same_words, with_template
from trainer.models import limits, start_model
from trainer.rewards.local_model import LocalModel
from trainer.rewards.models import Moments, RewardModel, RewardModels
from trainer.rewards.remote import RemoteRewards
from trainer.rewards.served_model import ServedModel
from trainer.supervised.reward_model import STATISTICS
from trainer.watchdog import Watchdog
from workers.controller.group import WorkerGroup
from workers.engine import check_engine
from workers.engine.base import Head
from workers.engine.hf_model import model_config, model_files
from workers.seeding import seed_of

HEADS = ("score", "classifier")
"""What transformers calls the heads of its classifiers."""


def check_reward_models(reward: ModelScoringConfig, trainer: WorkersConfig) -> None:
    """Before any process starts. Raises ValueError, one line, for what is not there or is no reward model."""
    for name, config in reward_models(reward).items():
        if config.urls:
            continue
        check_one(model_key(name, reward), config, trainer)


def check_one(key: str, config: ScoringModelConfig, trainer: WorkersConfig) -> None:
    """See check_reward_models."""
    try:
        check_head(engine_model(config))
        stored(config)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{key}: {error}") from error
    check_engine(key, config, engine_model(config), head_of(config), trainer.device)


def check_head(model: ModelConfig) -> None:
    """Raises ValueError for a model without a head of one label, which would be given a new one: it would score nothing."""
    made = (model_config(model, "reward").architectures or ["a model"])[0]
    names = {name for file in Path(model_files(model)).glob("*.safetensors") for name in tensor_names(file)}
    if not any(name.endswith(".weight") and name.split(".")[0] in HEADS for name in names):
        raise ValueError(
            f"model.path={model.path}: {made} has no score head (no {HEADS[0]}.weight or {HEADS[1]}.weight), so it is no reward "
            "model; take one, or make one of a language model with trainer.main_reward_model"
        )


def tensor_names(file: Path) -> list[str]:
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
    """workers: those of ``group``. tokenizer, template_kwargs: the policy's. None: there are no reward models.

    Raises ValueError, one line, for a tokenizer or template that is not there, and for tokens that could not be told apart.
    """
    models = []
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
    works_here = any(not model.config.urls for model in models)
    place = group if works_here else None
    return RewardModels(models, rule_weight=reward.weight, asks_rules=has_score(reward), group=place)


def start_one(
    name: str,
    config: ScoringModelConfig,
    conversations: Conversations | None,
    group: WorkerGroup,
    workers: Workers,
    trainer: WorkersConfig,
    watchdog: Watchdog,
) -> RewardModel:
    model, head = engine_model(config), head_of(config)
    cut = limits(
        config,
        workers,
        per_gpu=config.forward_micro_batch_size_per_gpu,
        over_all=config.forward_micro_batch_size,
        dynamic=config.use_dynamic_bsz,
        max_tokens=config.forward_max_token_len_per_gpu,
    )
    remote = start_model(
        group,
        f"reward/{name}",
        model=model,
        head=head,
        sharding=config.sharding,
        device=trainer.device,
        seed=seed_of(trainer.seed, "reward"),
        forward_limits=cut,
        training=None,
        watchdog=watchdog,
    )
    bounds = [bound for bound in (config.max_length, cut.max_tokens) if bound is not None]
    vocabulary = int(model_config(model, head).get_text_config().vocab_size)
    scorer = LocalModel(name, config, remote, conversations, longest=min(bounds) if bounds else None, vocabulary=vocabulary)
    moments = RunningMoments() if config.normalize == "running" else stored(config)
    return RewardModel(name, config, scorer, moments)


def ask_servers(
    name: str, config: ScoringModelConfig, servers: RemoteRewards, tokenizer: PreTrainedTokenizerBase, watchdog: Watchdog
) -> RewardModel:
    """Raises ValueError if no server is there."""
    with watchdog.own("start", f"reward model {name}", ", ".join(config.urls)):
        servers.wait_ready()
    moments = RunningMoments() if config.normalize == "running" else None
    return RewardModel(name, config, ServedModel(name, servers, tokenizer, watchdog), moments)


def own_conversations(
    config: ScoringModelConfig, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict
) -> Conversations | None:
    """None where the policy's tokens are the model's."""
    own = with_template(load_tokenizer(engine_model(config)), config.chat_template)
    if same_words(own, tokenizer) and config.apply_chat_template_kwargs in ({}, template_kwargs):
        return None
    if config.kind == "token":
        raise ValueError(
            f"kind=token: the policy's tokens are rewarded, and the tokenizer of {own.name_or_path} or its chat template is "
            "another than the policy's; kind=sequence takes any"
        )
    return Conversations(own, config.apply_chat_template_kwargs)


def stored(config: ScoringModelConfig) -> Moments | None:
    """Mean and deviation of the model's scores as they lie beside it, or as OpenRLHF writes them, in config.json; None where they
    are not asked for. Raises ValueError if they are not there, or cannot be divided by.
    """
    if config.normalize != "stored":
        return None
    directory = Path(model_files(engine_model(config)))
    file = directory / STATISTICS if (directory / STATISTICS).is_file() else directory / "config.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    if not {"mean", "std"} <= told.keys():
        raise ValueError(f"normalize=stored: no {STATISTICS} beside {config.path}; trainer.main_reward_model writes it")
    if not (math.isfinite(told["mean"]) and math.isfinite(told["std"]) and told["std"] > 0):
        raise ValueError(f"normalize=stored: {file} has mean {told['mean']} and std {told['std']}, which do not normalise")
    return Moments(told["mean"], told["std"])


def head_of(config: ScoringModelConfig) -> Head:
    """A value head answers for every token."""
    return "reward" if config.kind == "sequence" else "value"


def engine_model(config: ScoringModelConfig) -> TokenizedModelConfig:
    """Of a role that is never trained."""
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
