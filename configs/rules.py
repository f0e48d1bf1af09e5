"""Who gives the score beside reward models. Loads next to nothing: scoring processes start with it."""

from configs.schema.ppo import RemoteScoringConfig, ScoringConfig

NO_RULES = "none"
"""What reward.scorer says where no rule is asked."""


def asks_rules(reward: ScoringConfig) -> bool:
    """A scorer or a function of the user's scores the answers, beside reward models or alone."""
    return reward.custom_reward_function.path is not None or reward.scorer != NO_RULES


def has_score(reward: RemoteScoringConfig) -> bool:
    """There is a score beside those of reward models: of rules, or of the servers in their place."""
    return bool(reward.remote_urls) or asks_rules(reward)


def wants_truth(reward: RemoteScoringConfig) -> bool:
    """Rows must have what rules score by, a data source and a ground truth. Servers are told of them where they are there."""
    return not reward.remote_urls and asks_rules(reward)
