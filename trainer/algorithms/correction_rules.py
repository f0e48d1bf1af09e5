"""Parse the bounds and rules of algorithm.rollout_correction. Does not import torch: configuration checks use it."""

import math

from configs.schema.ppo import RolloutCorrectionConfig

_KEY = "algorithm.rollout_correction"
_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTIONS = tuple(f"{level}_{kind}" for level in _LEVELS for kind in ("k1", "k2", "k3") if (level, kind) != ("seq_max", "k1"))


def weight_bounds(spec: str) -> tuple[float | None, float]:
    """(lower, upper) of rollout_is_threshold, which is "upper" (lower: None) or "lower_upper" (IcePop). Raises ValueError."""
    key = f"{_KEY}.rollout_is_threshold={spec}"
    numbers = _numbers(spec, key)
    if len(numbers) > 2 or min(numbers) <= 0 or sorted(numbers) != numbers:
        raise ValueError(f"{key}: must be an upper bound above 0, such as 2.0, or lower_upper, such as 0.5_5.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def rejection_rules(config: RolloutCorrectionConfig) -> list[tuple[str, float, float]]:
    """(rule, lower, upper) of each rule in rollout_rs, as bounds of the rule's statistic. Raises ValueError.

    k1 bounds are configured for pi_rollout / pi_old, whose logarithm is k1: the inverse of the ratio that rollout_is bounds, as
    in verl.
    """
    if config.rollout_rs is None:
        return []
    rules = list(dict.fromkeys(rule.strip() for rule in config.rollout_rs.split(",") if rule.strip()))
    unknown = [rule for rule in rules if rule not in REJECTIONS]
    if unknown or not rules:
        raise ValueError(f"{_KEY}.rollout_rs={config.rollout_rs}: must be a comma-separated list of {', '.join(REJECTIONS)}")
    key = f"{_KEY}.rollout_rs_threshold={config.rollout_rs_threshold}"
    specs = [part.strip() for part in (config.rollout_rs_threshold or "").split(",") if part.strip()]
    if config.rollout_rs_threshold is None or len(specs) not in (1, len(rules)):
        raise ValueError(
            f"{key}: must be one bound for all rules, or {len(rules)} separated by commas, one for each of {', '.join(rules)}"
        )
    found = []
    for rule, spec in zip(rules, specs * (len(rules) if len(specs) == 1 else 1), strict=True):
        numbers = _numbers(spec, key)
        if rule.endswith("k1"):
            # A single bound b stands for [1 / b, b], symmetric in log space.
            lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0] if numbers[0] else 0.0, numbers[0])
            if len(numbers) > 2 or not 0 < lower <= upper:
                raise ValueError(
                    f"{key}: {rule} takes bounds of pi_rollout / pi_old: lower_upper, such as 0.5_2.0, or an upper bound >= 1"
                )
            found.append((rule, math.log(lower), math.log(upper)))
        else:
            if len(numbers) > 1 or numbers[0] <= 0:
                raise ValueError(f"{key}: {rule} takes one upper bound above 0, such as 0.01")
            found.append((rule, 0.0, numbers[0]))
    return found


def _numbers(spec: str, key: str) -> list[float]:
    try:
        return [float(part) for part in spec.strip().split("_")]
    except ValueError:
        raise ValueError(f"{key}: {spec!r} is neither a number nor lower_upper; write 2.0, or 0.5_5.0") from None
