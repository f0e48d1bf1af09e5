"""Rollout correction: importance weights and rejection for tokens sampled from a policy that differs from the trained one.

Problem: the rollout engine uses other kernels, another precision or older weights than the trainer, so samples are off-policy
even in synchronous training, and the policy gradient is biased. Idea: x = log pi_old - log pi_rollout of each sampled token is
known exactly, since both sides report log-probs; rho = exp(x) reweights the loss. Products of rho over long responses have
unbounded variance, hence the weights are truncated (bias for variance) and tokens or responses with an implausible ratio are
rejected. Cost: no forward pass, a few segment sums over (T,).

Truncated weights: Yao et al. 2025, «Your efficient RL framework secretly brings you off-policy RL training». Rejection: Liu
et al. 2025, «When speed kills stability». IcePop: Ling team 2025, arXiv:2510.18855. Names and metrics follow verl 0.9.1.
Everything is computed in float64 over unpadded tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import RolloutCorrectionConfig
from trainer.algorithms.correction_rules import rejection_rules, weight_bounds
from trainer.algorithms.segments import row_ids, sum_by
from workers.batch import counts_in
from workers.metric import Metric, Metrics, Sample, masked_extreme

SAFE = 20.0
"""Clamp of |x| before exp, against overflow."""


@dataclass(frozen=True, slots=True)
class Correction:
    """weights (T,): factors of the policy loss; None without rollout_is. mask (T,): response_mask minus rejected tokens."""

    weights: Tensor | None
    mask: Tensor
    metrics: dict[str, float]


def is_enabled(config: RolloutCorrectionConfig) -> bool:
    return (config.rollout_is, config.rollout_rs, config.rollout_token_veto_threshold) != (None, None, None)


def rollout_correction(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Importance weights, rejections and metrics of a batch; all tensors (T,), lengths (B,).

    Weights and rejections are computed on the same, unreduced mask. A batch without trained tokens has weights of 0 and no
    metrics.
    """
    tokens = _Tokens(response_mask, lengths)
    if not tokens.mask.any():
        none = torch.zeros_like(old_log_probs) if config.rollout_is is not None else None
        return Correction(none, response_mask, {})
    log_ratio = torch.where(tokens.mask, (old_log_probs.double() - rollout_log_probs.double()), 0.0)
    weights, mask = None, response_mask
    metrics: dict[str, float] = {}
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio, tokens, config, metrics).to(old_log_probs.dtype)
    if config.rollout_rs is not None or config.rollout_token_veto_threshold is not None:
        mask = response_mask * kept(log_ratio, tokens, config, metrics)
    # Over all trained tokens: rejected ones are part of the divergence.
    metrics |= off_policy(old_log_probs.double(), rollout_log_probs.double(), tokens)
    return Correction(weights, mask, {f"rollout_corr/{name}": float(value) for name, value in metrics.items()})


def importance_weights(
    log_ratio: Tensor, tokens: "_Tokens", config: RolloutCorrectionConfig, metrics: dict[str, float]
) -> Tensor:
    """rho of each token or, as a product, of its response (T,); truncated above (TIS), or 0 outside two bounds (IcePop)."""
    lower, upper = weight_bounds(config.rollout_is_threshold)
    of_row = tokens.row_sum(log_ratio)
    x = log_ratio if config.rollout_is == "token" else of_row[tokens.rows]
    # Clamp the sum, not its terms: sequence ratios multiply hundreds of tokens, and only their total must not overflow.
    raw = x.clamp(-SAFE, SAFE).exp() * tokens.mask
    weights = bounded(raw, lower, upper)

    low = 1.0 / upper if lower is None else lower
    row_means, raw_row_means = tokens.row_mean(weights), tokens.row_mean(raw)
    if config.rollout_is == "sequence":
        # Extremes and fractions come from the logs: the truncated weights no longer show how far a ratio went.
        metrics |= {
            "rollout_is_max": float(of_row.max().clamp(max=SAFE).exp()),
            "rollout_is_min": float(of_row.min().exp()),
            "rollout_is_ratio_fraction_high": _share(of_row > math.log(upper)),
            "rollout_is_ratio_fraction_low": _share(of_row < math.log(low)),
        }
    else:
        metrics |= {
            "rollout_is_max": float(weights[tokens.mask].max()),
            "rollout_is_min": float(weights[tokens.mask].min()),
            "rollout_is_ratio_fraction_high": tokens.mean(raw > upper),
            "rollout_is_ratio_fraction_low": tokens.mean(raw < low),
        }
    mean = tokens.mean(weights)
    spread = tokens.mean((weights.clamp(max=upper) / (mean + 1e-8)).square())
    metrics |= {
        "rollout_is_mean": mean,
        "rollout_is_std": tokens.std(weights.clamp(max=upper)),
        "rollout_is_eff_sample_size": 1.0 / spread if spread else 0.0,
        **_row_statistics("rollout_is", row_means, centre=1.0),
        "rollout_is_seq_fraction_high": _share(raw_row_means > upper),
        "rollout_is_seq_fraction_low": _share(raw_row_means < low),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = tokens.mean((raw < lower) | (raw > upper))
    # Last: the metrics above describe the weights before normalisation, as verl's do.
    if config.rollout_is_batch_normalize:
        factor = mean if config.rollout_is == "token" else float(row_means[tokens.counts > 0].mean())
        factor = factor if factor > 1e-8 else 1.0
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights


def bounded(ratios: Tensor, lower: float | None, upper: float) -> Tensor:
    """Ratios truncated above (TIS) or, with a lower bound, 0 outside of both (IcePop)."""
    return ratios.clamp(max=upper) if lower is None else torch.where((ratios >= lower) & (ratios <= upper), ratios, 0.0)


def micro_batch_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Metrics]:
    """Importance weights (T,) as those of ``rollout_correction``, from a micro-batch of complete responses, and their metrics.

    For old log-probs that only the update knows (proximal.py). rollout_is_batch_normalize and rejections need the whole batch.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    x = log_ratio
    if config.rollout_is == "sequence":
        rows = row_ids(lengths.to(x.device))
        x = sum_by(x, rows, len(lengths))[rows]
    lower, upper = weight_bounds(config.rollout_is_threshold)
    raw = x.clamp(-SAFE, SAFE).exp() * mask
    weights = bounded(raw, lower, upper)
    low = 1.0 / upper if lower is None else lower
    return weights.to(old_log_probs.dtype), {
        "rollout_corr/rollout_is_mean": Metric.token_mean(weights, response_mask),
        "rollout_corr/rollout_is_max": masked_extreme(weights, mask, "max"),
        "rollout_corr/rollout_is_min": masked_extreme(weights, mask, "min"),
        "rollout_corr/rollout_is_ratio_fraction_high": Metric.token_mean(raw > upper, response_mask),
        "rollout_corr/rollout_is_ratio_fraction_low": Metric.token_mean(raw < low, response_mask),
        "rollout_corr/kl": Metric.token_mean(-log_ratio, response_mask),
    }


def kept(log_ratio: Tensor, tokens: "_Tokens", config: RolloutCorrectionConfig, metrics: dict[str, float]) -> Tensor:
    """1 where a token is kept, 0 where a rule rejects it or its whole response: (T,).

    Rules apply to a token, or to the sum, mean or maximum over the response. k1 = -x must lie within the logs of its two
    bounds, that is pi_rollout / pi_old = 1 / rho (for seq_mean_k1: its geometric mean) within the bounds, as in verl. k2 =
    x^2 / 2 and k3 = exp(x) - 1 - x must not exceed their bound. Veto: a response with any token whose rho is below
    rollout_token_veto_threshold is rejected as a whole.
    """
    x = log_ratio.clamp(-SAFE, SAFE)
    kinds = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.exp() - 1.0 - x}
    summaries = {"token": tokens.row_mean, "seq_sum": tokens.row_sum, "seq_mean": tokens.row_mean, "seq_max": tokens.row_max}
    stays = torch.ones_like(tokens.mask)
    for rule, lower, upper in rejection_rules(config):
        level, _, kind = rule.rpartition("_")
        value = kinds[kind]
        of_row = summaries[level](value)
        statistic = value if level == "token" else of_row[tokens.rows]
        ok = (statistic >= lower) & (statistic <= upper) if kind == "k1" else statistic <= upper
        stays &= ok
        metrics |= _rejection_metrics(rule, statistic, of_row, tokens, lower=lower, upper=upper)
        metrics[f"rollout_rs_{rule}_masked_fraction"] = tokens.mean(~ok)
        metrics[f"rollout_rs_{rule}_seq_masked_fraction"] = _share(tokens.row_max(~ok)[tokens.counts > 0])
    if config.rollout_token_veto_threshold is not None:
        # On the unclamped log ratio: a threshold below exp(-SAFE) would otherwise never be reached.
        vetoed = tokens.row_max(log_ratio < math.log(config.rollout_token_veto_threshold)) > 0
        stays &= ~vetoed[tokens.rows]
        metrics["rollout_rs_veto_seq_masked_fraction"] = _share(vetoed)
    metrics["rollout_rs_masked_fraction"] = tokens.mean(~stays)
    metrics["rollout_rs_seq_masked_fraction"] = _share(tokens.row_max(~stays))
    return stays.to(log_ratio.dtype)


def off_policy(log_probs: Tensor, rollout_log_probs: Tensor, tokens: "_Tokens") -> dict[str, float]:
    """Divergence metrics of the two policies: KL(rollout || training) by k1 and k3, perplexities, chi-squared."""
    log_ratio = torch.where(tokens.mask, log_probs - rollout_log_probs, 0.0)
    training, rollout = tokens.row_mean(log_probs), tokens.row_mean(rollout_log_probs)
    gap = rollout - training
    return {
        "kl": tokens.mean(-log_ratio),
        "k3_kl": tokens.mean(log_ratio.exp() - log_ratio - 1),
        "training_ppl": float((-training).exp().mean()),
        "training_log_ppl": float(-training.mean()),
        "rollout_ppl": float((-rollout).exp().mean()),
        "rollout_log_ppl": float(-rollout.mean()),
        "log_ppl_diff": float(gap.mean()),
        "log_ppl_abs_diff": float(gap.abs().mean()),
        "log_ppl_diff_max": float(gap.max()),
        "log_ppl_diff_min": float(gap.min()),
        "ppl_ratio": float(gap.exp().mean()),
        "chi2_token": tokens.mean((2 * log_ratio.clamp(-SAFE, SAFE)).exp()) - 1.0,
        "chi2_seq": float((2 * tokens.row_sum(log_ratio).clamp(-SAFE, SAFE)).exp().mean()) - 1.0,
    }


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric | Sample]:
    """Metrics of the trainer's minus the rollout engine's log-probs of the sampled tokens; all (T,). Logged in every step."""
    # torch.where before any arithmetic: columns outside the mask may hold anything, also NaN, and NaN * 0 is NaN.
    trained = mask.bool()
    x = torch.where(trained, log_probs - rollout_log_probs, 0.0)
    probs = torch.where(trained, log_probs.exp() - rollout_log_probs.exp(), 0.0).abs()
    ratio = x.clamp(-SAFE, SAFE).exp()
    return {
        "training/rollout_probs_diff_mean": Metric.token_mean(probs, mask),
        "training/rollout_probs_diff_max": masked_extreme(probs, mask, "max"),
        "training/rollout_log_probs_diff_mean": Metric.token_mean(x.abs(), mask),
        "training/rollout_log_probs_diff_max": masked_extreme(x.abs(), mask, "max"),
        "training/rollout_kl_k1": Metric.token_mean(-x, mask),
        "training/rollout_kl_k3": Metric.token_mean(ratio - 1 - x, mask),
        "training/rollout_ratio": Sample.where(ratio, mask),
    }


def _rejection_metrics(
    rule: str, statistic: Tensor, of_row: Tensor, tokens: "_Tokens", *, lower: float, upper: float
) -> dict[str, float]:
    """Metrics of one rejection rule, under verl's names.

    Fractions and extremes are over responses for a sequence-level rule, else over tokens.
    """
    name, two_sided = f"rollout_rs_{rule}", rule.endswith("k1")
    of_row = of_row[tokens.counts > 0]
    counted = statistic[tokens.mask] if rule.startswith("token") else of_row
    metrics = {
        f"{name}_mean": tokens.mean(statistic),
        f"{name}_std": tokens.std(statistic.clamp(lower, upper)),
        f"{name}_max": float(counted.max()),
        f"{name}_min": float(counted.min()),
        f"{name}_fraction_high": _share(counted > upper),
        f"{name}_fraction_low": _share(counted < lower) if two_sided else 0.0,
        **_row_statistics(name, of_row, centre=0.0),
        f"{name}_seq_fraction_high": _share(of_row > upper),
    }
    return metrics | ({f"{name}_seq_fraction_low": _share(of_row < lower)} if two_sided else {})


def _row_statistics(name: str, values: Tensor, *, centre: float) -> dict[str, float]:
    return {
        f"{name}_seq_mean": float(values.mean()),
        f"{name}_seq_std": float(values.std()) if len(values) > 1 else 0.0,
        f"{name}_seq_max": float(values.max()),
        f"{name}_seq_min": float(values.min()),
        f"{name}_seq_max_deviation": float((values - centre).abs().max()),
    }


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


class _Tokens:
    """Means and sums over the trained tokens of a batch and of its rows, in float64."""

    def __init__(self, response_mask: Tensor, lengths: Tensor) -> None:
        self.mask = response_mask.bool()
        # verl's denominator. In float32 the 1e-8 is absorbed for any non-empty batch.
        self.total = float(response_mask.sum() + 1e-8)
        self.rows = row_ids(lengths)
        self.n = len(lengths)
        self.counts = counts_in(self.mask, lengths)

    def mean(self, values: Tensor) -> float:
        return float(values[self.mask].double().mean())

    def std(self, values: Tensor) -> float:
        """Standard deviation by verl's formula, E[x^2] - E[x]^2 with the denominator ``total``."""
        # Where all values are equal the 1e-8 of ``total`` leaves a small remainder, which may be negative: max(0, ...).
        chosen = values[self.mask].double()
        variance = chosen.square().sum() / self.total - (chosen.sum() / self.total) ** 2
        return max(0.0, float(variance)) ** 0.5 if len(chosen) > 1 else 0.0

    def row_sum(self, values: Tensor) -> Tensor:
        """Sum per row, (T,) -> (B,); 0 for a row without trained tokens, as in the two functions below."""
        return sum_by(values[self.mask], self.rows[self.mask], self.n)

    def row_mean(self, values: Tensor) -> Tensor:
        return self.row_sum(values) / self.counts.clamp(min=1)

    def row_max(self, values: Tensor) -> Tensor:
        out = torch.full((self.n,), -torch.inf, dtype=torch.float64)
        out = out.scatter_reduce(0, self.rows[self.mask], values[self.mask].double(), "amax")
        return torch.where(self.counts > 0, out, 0.0)
