import pytest
import torch

from trainer.ppo.batch_columns import named_rewards


def test_named_rewards_have_the_order_of_their_names() -> None:
    found = named_rewards([{"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 3.0}], ["b", "a"])
    assert list(found) == ["b", "a"] and torch.equal(found["b"], torch.tensor([2.0, 4.0]))


def test_missing_reward_is_a_one_line_error() -> None:
    with pytest.raises(
        ValueError, match=r"gdpo_reward_keys: the reward function reports no format for a response; it reports acc$"
    ):
        named_rewards([{"acc": 1.0, "format": 0.0}, {"acc": 1.0}], ["acc", "format"])
