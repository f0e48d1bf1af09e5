import pytest
import torch

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.workers.test_batch import numbered
from trainer.algorithms.advantages import ADVANTAGES
from trainer.ppo.batch_columns import advantage_inputs, named_rewards


def test_named_rewards_have_the_order_of_their_names() -> None:
    found = named_rewards([{"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 3.0}], ["b", "a"])
    assert list(found) == ["b", "a"] and torch.equal(found["b"], torch.tensor([2.0, 4.0]))


def test_missing_reward_is_a_one_line_error() -> None:
    with pytest.raises(
        ValueError, match=r"gdpo_reward_keys: the reward function reports no format for a response; it reports acc$"
    ):
        named_rewards([{"acc": 1.0, "format": 0.0}, {"acc": 1.0}], ["acc", "format"])


def test_rewards_that_the_estimator_does_not_read_may_be_missing() -> None:
    assert named_rewards([{"acc": 1.0, "format": 0.0}, {"acc": 0.0}], ["acc", "format"], needed=False).keys() == {"acc"}
    batch = numbered([1, 1]).with_tokens(response_mask=torch.ones(2)).with_rows(group=torch.tensor([0, 0]))
    batch.objects["reward_extra"] = [{}] * 2
    words = ["algorithm.gdpo_reward_keys=[acc]", "algorithm.adv_estimator="]
    assert advantage_inputs(batch, torch.ones(2), compose("ppo_trainer", PPOConfig, [words[0], f"{words[1]}grpo"]).algorithm)
    with pytest.raises(ValueError, match="reports no acc"):
        advantage_inputs(batch, torch.ones(2), compose("ppo_trainer", PPOConfig, [words[0], f"{words[1]}gdpo"]).algorithm)


def test_groups_with_the_same_prompt_have_baselines_of_their_own() -> None:
    """One data row is in the batch twice, from two epochs."""
    batch = numbered([1] * 6).with_tokens(response_mask=torch.ones(6))
    batch = batch.with_rows(uid=torch.tensor([4, 4, 4, 4, 9, 9]), group=torch.tensor([30, 30, 12, 12, 13, 13]))
    batch.objects["reward_extra"] = [{}] * 6
    config = compose("ppo_trainer", PPOConfig, ["algorithm.norm_adv_by_std_in_grpo=false"]).algorithm
    inputs = advantage_inputs(batch, torch.tensor([0.0, 2.0, 10.0, 20.0, 5.0, 5.0]), config)
    assert ADVANTAGES["grpo"](inputs, config).advantages.tolist() == [-1.0, 1.0, -5.0, 5.0, 0.0, 0.0]
