"""Proximal policy without a forward pass: log-linear interpolation between the policies that sampled and that are updated.

Problem: decoupled PPO (AReaL, arXiv:2505.24298, eq. 5) clips the ratio of the trained policy to a proximal one, here the policy
before the step's updates, and weights each token by proximal over behaviour. Its log-probs take a forward pass over the batch.
Idea (A-3PO, arXiv:2512.06547): each token has the version of the weights that sampled it, and the update computes the log-probs
of the present weights anyway. If log pi moves evenly with the version, the proximal policy lies between the two:

    log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav),  alpha = (v_prox - v_behav) / (v_theta - v_behav)

Versions count steps. v_prox is the version at the start of the step. v_prox - v_behav is the token's staleness, >= 0. After k of
the K updates of a step theta is at v_prox + k / K, so alpha = staleness / (staleness + k / K). The first mini-batch is exact:
theta is the proximal policy, and alpha = 1. Later, a token of staleness 0 has alpha = 0: the policy that sampled it is the
proximal one, up to the mismatch of engine and trainer, which is then not corrected. AReaL takes v_theta = v_prox + 1 in all
mini-batches, the limit of this alpha at the end of the step.
"""

import torch
from torch import Tensor


def interpolation(staleness: Tensor, progress: float) -> Tensor:
    """alpha (T,), float64, between 0 and 1.

    staleness (T,): v_prox - v_behav of each token, in steps. progress: k / K, the part of the step's updates that was applied.
    """
    # Before the first update 0 / 0 where nothing is stale. The limit is 1: theta is the proximal policy whatever the token's age.
    if progress == 0.0:
        return torch.ones(len(staleness), dtype=torch.float64)
    distance = staleness.double().clamp(min=0.0)
    return distance / (distance + progress)


def proximal_log_probs(log_probs: Tensor, rollout_log_probs: Tensor, alpha: Tensor, mask: Tensor) -> Tensor:
    """Interpolated log-probs of the proximal policy (T,), without gradient; 0 outside ``mask``. All tensors (T,)."""
    # torch.where first: columns outside the mask may hold anything. lerp is exact at 0 and at 1, a product and a sum are not.
    theta, behavior = (torch.where(mask.bool(), column.detach(), 0.0) for column in (log_probs, rollout_log_probs))
    return torch.lerp(behavior.to(theta.dtype), theta, alpha.to(theta.dtype))
