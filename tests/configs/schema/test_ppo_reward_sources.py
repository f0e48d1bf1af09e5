"""Sources of the score other than reward models."""

from typing import Any

import pytest

from configs.compose import compose
from configs.schema.ppo import PPOConfig, asks_rules, has_score, wants_truth


@pytest.mark.parametrize(
    ("words", "rules", "score"),
    [
        ((), True, True),
        (("reward.scorer=none",), False, False),
        (("reward.scorer=none", "reward.custom_reward_function.path=x.py"), True, True),
        (("reward.scorer=none", "reward.remote_urls=[http://127.0.0.1:1]"), False, True),
        (("reward.remote_urls=[http://127.0.0.1:1]",), True, True),
    ],
)
def test_sources_of_the_score_follow_from_the_keys(words: Any, rules: bool, score: bool) -> None:
    reward = compose("ppo_trainer", PPOConfig, words).reward
    assert (asks_rules(reward), has_score(reward)) == (rules, score)
    assert wants_truth(reward) is (rules and not reward.remote_urls)
