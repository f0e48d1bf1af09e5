"""The default configuration, and the losses' inputs, for tests of pure functions."""

from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from configs.keys import CONFIG_DIR
from configs.load import load_ppo
from configs.schema.ppo import PPOConfig
from trainer.algorithms.policy_losses import PolicyLossInputs


@cache
def defaults() -> PPOConfig:
    tree = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    assert isinstance(tree, DictConfig)
    del tree["defaults"]
    return load_ppo(tree)


def loss_inputs(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **others: Any) -> PolicyLossInputs:
    """One row, all of it trained, unless said otherwise."""
    plain = {"response_mask": torch.ones_like(advantages), "lengths": torch.tensor([len(advantages)])}
    return PolicyLossInputs(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, **(plain | others))
