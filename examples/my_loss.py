"""Custom policy loss: no gradient for tokens far from the old policy. Used by docs/how_to/algorithm.md."""

from torch import Tensor

from configs.schema.ppo import ActorConfig
from trainer.algorithms.policy_losses import PolicyLossInputs
from workers.metric import Metric, Metrics


def near_only(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """-A log pi where the ratio to the old policy lies within clip_ratio_low and clip_ratio_high, else 0: (T,)."""
    ratio = inputs.log_ratio().detach().exp()
    near = (ratio > 1 - config.clip_ratio_low) & (ratio < 1 + config.clip_ratio_high)
    return -inputs.advantages * inputs.log_probs * near, {"actor/near": Metric.token_mean(near, inputs.response_mask)}
