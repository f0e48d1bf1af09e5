"""Checks before any process starts: loggers and engines are installed, and the engines support the configured models."""

from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import PPOConfig
from configs.validation.batches import roles_of
from trainer.algorithms.advantages import ADVANTAGES
from trainer.data.chat import load_tokenizer
from trainer.data.encoding import encode
from trainer.data.files import first_value
from trainer.rewards.models.reward_builder import check_reward_models
from trainer.tracking.tracker import check_loggers
from workers.engine.hf.hf_model import vocab_size
from workers.roles.train_engines import check_engine


def check_engines(config: PPOConfig) -> None:
    """Check loggers, training engines and reward models. Raises what check_engine and check_reward_models raise."""
    check_loggers(config.trainer.logger)
    device = config.trainer.device
    for key, role in roles_of(config, has_critic=wants_critic(config)).items():
        if role is config.critic:
            check_engine(key, role, config.critic.model, "value", device)
        elif key.startswith("actor_rollout_ref."):
            check_engine(key, role, config.actor_rollout_ref.model, "lm", device)
    check_reward_models(config.reward, config.trainer)


def reader(config: PPOConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and check that the model is supported and the first row of each split can be encoded.

    Raises ValueError, one line.
    """
    vocab_size(config.actor_rollout_ref.model)
    tokenizer, data = load_tokenizer(config.actor_rollout_ref.model), config.data
    # One row per split only: a fast check for errors that affect all rows. The data is read while the workers start.
    for key, name in (("data.train_files", data.train_files[0]), ("data.val_files", data.val_files[0])):
        try:
            encode(tokenizer, [first_value(name, data.prompt_key)], data.apply_chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"{key}={name}, row 0: {error}") from error
    return tokenizer


def wants_critic(config: PPOConfig) -> bool:
    """Whether the run has a critic: requested by critic.enable, or needed by the advantage estimator."""
    return config.critic.enable is True or "values" in ADVANTAGES.needs(config.algorithm.adv_estimator)
