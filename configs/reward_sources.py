"""Rule-based scoring next to reward models. Imports very little, because every scoring process imports it."""

from configs.schema.ppo import RemoteScoringConfig, ScoringConfig

NO_RULES = "none"
"""Value of reward.scorer that disables rule-based scoring."""


def asks_rules(reward: ScoringConfig) -> bool:
    """Whether a scorer or a user's function scores responses, with or without reward models."""
    return reward.custom_reward_function.path is not None or reward.scorer != NO_RULES


def has_score(reward: RemoteScoringConfig) -> bool:
    """Whether there is a score other than those of reward models: from rules, or from servers that replace them."""
    return bool(reward.remote_urls) or asks_rules(reward)


def wants_truth(reward: RemoteScoringConfig) -> bool:
    """Whether rows must have a data source and a ground truth, which rules need. Servers get these columns if they exist."""
    return not reward.remote_urls and asks_rules(reward)
