"""Whether a run's engines are there, and can hold its models."""

from configs.checks_batches import roles_of
from configs.schema.ppo import PPOConfig
from trainer.algorithms.advantages import ADVANTAGES
from trainer.rewards.start import check_reward_models
from workers.engine import check_engine


def check_engines(config: PPOConfig) -> None:
    """Before any process starts. See workers.engine.check_engine and trainer.rewards.start.check_reward_models."""
    device = config.trainer.device
    for key, role in roles_of(config, has_critic=wants_critic(config)).items():
        if role is config.critic:
            check_engine(key, role, config.critic.model, "value", device)
        elif key.startswith("actor_rollout_ref."):
            check_engine(key, role, config.actor_rollout_ref.model, "lm", device)
    check_reward_models(config.reward, config.trainer)


def wants_critic(config: PPOConfig) -> bool:
    return config.critic.enable is True or "values" in ADVANTAGES.needs(config.algorithm.adv_estimator)
