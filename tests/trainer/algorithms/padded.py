"""Padded-tensor interface (B, R) to the flat algorithms, for comparison with other implementations.

Nothing is computed here: (B, R) is viewed as B rows of R tokens, the flat functions run on it, and (T,) is viewed as (B, R)
again. Options have the leaf names of the configuration (clip_ratio_low, norm_adv_by_std_in_grpo, ...) and default to
configs/ppo_trainer.yaml. Float64 inputs give float64 outputs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema.common import AggMode, KLKind
from configs.schema.ppo import PPOConfig
from trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from trainer.algorithms.correction import rollout_correction as flat_rollout_correction
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.losses.actor_loss import importance
from trainer.algorithms.losses.value_losses import clipped_value_loss
from trainer.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from trainer.algorithms.weights import token_weights
from workers.metric import Metric, plain_numbers

_ACTOR, _LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
_ALGORITHM, _CORRECTION = "algorithm", "algorithm.rollout_correction"
_COLUMNS = ("old_log_probs_BR", "sum_pi_squared_BR", "rollout_is_weights_BR", "last_value_B", "rewards_B")
_NEEDED = {
    "values": ("values_BR",),
    "baselines": ("baselines_B",),
    "sum_pi_squared": ("sum_pi_squared_BR", "old_log_probs_BR"),
}


def advantages(
    name: str,
    token_rewards_BR: Tensor,
    mask_BR: Tensor,
    group_ids_B: Tensor | Sequence[Any],
    *,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
    gamma: float | None = None,
    lam: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both (B, R), zero outside the mask.

    group_ids_B: labels comparable for equality. baselines_B: for remax. Besides configuration names, options may be
    old_log_probs_BR, sum_pi_squared_BR, rollout_is_weights_BR (optimal_token_baseline); rewards_B {name: (B,)} (gdpo; default:
    the sum of the token rewards); last_value_B (gae). Their suffixes are optional. Raises ValueError for a missing input.
    """
    columns = {name: options.pop(name, options.pop(name.rpartition("_")[0], None)) for name in _COLUMNS}
    given_columns = columns | {"values_BR": values_BR, "baselines_B": baselines_B}
    for need in ADVANTAGES.needs(name) & _NEEDED.keys():
        for column in _NEEDED[need]:
            if given_columns[column] is None:
                raise ValueError(f"{name} needs {column}")
    given = {"gamma": gamma, "lam": lam}
    config = _config((_ALGORITHM,), options | {key: value for key, value in given.items() if value is not None}).algorithm
    inputs = AdvantageInputs(
        token_rewards=token_rewards_BR.flatten(),
        response_mask=_flat_mask(mask_BR, token_rewards_BR),
        lengths=_lengths(mask_BR),
        uid=torch.tensor(_numbered(group_ids_B), dtype=torch.int64),
        values=_flat(values_BR),
        last_value=columns["last_value_B"],
        baselines=baselines_B,
        rewards=columns["rewards_B"] or {"score": token_rewards_BR.sum(-1)},
        old_log_probs=_flat(columns["old_log_probs_BR"]),
        sum_pi_squared=_flat(columns["sum_pi_squared_BR"]),
        is_weights=_flat(columns["rollout_is_weights_BR"]),
    )
    result = ADVANTAGES[name](inputs, config)
    return result.advantages.view(mask_BR.shape), result.returns.view(mask_BR.shape)


def policy_loss(
    name: str,
    old_log_probs_BR: Tensor,
    log_probs_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    agg_mode: AggMode,
    *,
    is_weights_BR: Tensor | None = None,
    seed: int | None = None,
    norm_length: int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Scalar policy loss, differentiable in log_probs, and its metrics. All tensors (B, R).

    seed: of the random selection in clip_cov; None: torch's global generator. norm_length: see aggregate.
    """
    config = _config((_ACTOR, _LOSS), options).actor_rollout_ref.actor
    inputs = PolicyLossInputs(
        log_probs=_flat_within(log_probs_BR, mask_BR),
        old_log_probs=_flat_within(old_log_probs_BR, mask_BR),
        advantages=_flat_within(advantages_BR, mask_BR),
        response_mask=_flat_mask(mask_BR, log_probs_BR),
        lengths=_lengths(mask_BR),
    )
    prepare = POLICY_LOSSES.prepare(name)
    if prepare is not None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        inputs = replace(inputs, chosen=prepare(inputs, config, generator))
    loss, metrics = POLICY_LOSSES[name](inputs, config)
    if is_weights_BR is not None:
        loss = loss * importance(inputs, _flat_within(is_weights_BR, mask_BR), POLICY_LOSSES.needs(name))
    scalar = aggregate(loss.view(mask_BR.shape), mask_BR, agg_mode, norm_length=norm_length)
    return scalar, plain_numbers(metrics)


def value_loss(
    vpreds_BR: Tensor,
    values_BR: Tensor,
    returns_BR: Tensor,
    mask_BR: Tensor,
    agg_mode: AggMode,
    *,
    cliprange_value: float | None = None,
    norm_length: int | None = None,
) -> tuple[Tensor, float]:
    """Scalar clipped value loss, differentiable in vpreds, and the fraction of clipped tokens. All tensors (B, R)."""
    cliprange = _config((), {}).critic.cliprange_value if cliprange_value is None else cliprange_value
    loss, clipped = clipped_value_loss(vpreds_BR, values_BR, returns_BR, cliprange)
    share = Metric.token_mean(clipped.flatten(), _flat_mask(mask_BR, vpreds_BR)).value
    return aggregate(loss, mask_BR, agg_mode, norm_length=norm_length), share


def kl(kind: KLKind, log_probs_BR: Tensor, ref_log_probs_BR: Tensor) -> Tensor:
    """KL estimate of each token (B, R); for kind ``full`` the inputs are (B, R, V)."""
    return kl_estimate(kind, log_probs_BR, ref_log_probs_BR)


def aggregate(loss_BR: Tensor, mask_BR: Tensor, mode: AggMode, *, norm_length: int | None = None) -> Tensor:
    """Aggregate ``loss`` (B, R) to a scalar. norm_length: denominator of seq-mean-token-sum-norm; None: R."""
    n_rows, longest = mask_BR.shape
    # torch.where instead of a product: the loss may be NaN in the padding, and 0 * NaN is NaN.
    weights = token_weights(mode, _flat_mask(mask_BR, loss_BR), _lengths(mask_BR), norm_length or longest).view(n_rows, longest)
    return torch.where(weights != 0, weights * loss_BR, 0.0).sum().to(loss_BR.dtype)


def rollout_correction(
    old_log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor, **options: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights, mask less the rejected, metrics); tensors (B, R). Without rollout_is every trained token's weight is 1."""
    config = _config((_CORRECTION,), options).algorithm.rollout_correction
    mask = _flat_mask(mask_BR, old_log_probs_BR)
    result = flat_rollout_correction(old_log_probs_BR.flatten(), rollout_log_probs_BR.flatten(), mask, _lengths(mask_BR), config)
    weights = mask if result.weights is None else result.weights
    return weights.view(mask_BR.shape), result.mask.view(mask_BR.shape).to(mask_BR.dtype), result.metrics


def _flat(padded: Tensor | None) -> Tensor | None:
    return None if padded is None else padded.flatten()


def _flat_within(padded: Tensor, mask: Tensor) -> Tensor:
    """Flatten with 0 outside the mask: padding may hold any value, also NaN."""
    return torch.where(mask.bool(), padded, 0.0).flatten()


def _numbered(labels: Tensor | Sequence[Any]) -> list[int]:
    """Integer ids, equal for equal labels."""
    plain = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(plain))}
    return [numbers[label] for label in plain]


def _flat_mask(mask: Tensor, like: Tensor) -> Tensor:
    return mask.flatten().to(like.dtype)


def _lengths(mask: Tensor) -> Tensor:
    return torch.full((mask.shape[0],), mask.shape[1], dtype=torch.int64)


def _config(nodes: tuple[str, ...], options: Mapping[str, Any]) -> PPOConfig:
    """The default configuration with ``options`` applied, which are leaf names below ``nodes``."""
    return _loaded(nodes, json.dumps(options))


@lru_cache(maxsize=256)
def _loaded(nodes: tuple[str, ...], options: str) -> PPOConfig:
    from configs.load import ppo_config  # imports omegaconf, which the algorithms do not need

    return ppo_config(nodes, json.loads(options))
