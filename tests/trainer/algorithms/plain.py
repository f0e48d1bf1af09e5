"""Default configuration and policy-loss inputs for tests of pure functions."""

from typing import Any

import torch
from torch import Tensor

from configs.load import ppo_config
from trainer.algorithms.policy_losses import PolicyLossInputs

defaults = ppo_config


def loss_inputs(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **others: Any) -> PolicyLossInputs:
    """Inputs of one row with every token trained, unless overridden."""
    plain = {"response_mask": torch.ones_like(advantages), "lengths": torch.tensor([len(advantages)])}
    return PolicyLossInputs(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, **(plain | others))
