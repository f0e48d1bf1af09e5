import pytest

from configs.compose import compose
from configs.load import ppo_config
from configs.schema.ppo import PPOConfig


def test_defaults_equal_an_empty_command_line() -> None:
    assert ppo_config() == compose("ppo_trainer", PPOConfig, [])


def test_a_change_reaches_keys_that_follow_it_and_is_checked() -> None:
    actor = ppo_config(("actor_rollout_ref.actor",), {"clip_ratio": 0.3, "clip_ratio_high": 0.4}).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)
    with pytest.raises(ValueError, match=r"clip_ratoi: unknown option; known: .*clip_ratio, "):
        ppo_config(("actor_rollout_ref.actor",), {"clip_ratoi": 0.3})
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.actor\.clip_ratio_c=0\.5: must be"):
        ppo_config(("actor_rollout_ref.actor",), {"clip_ratio_c": 0.5})
