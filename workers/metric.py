"""Metrics that aggregate exactly over micro-batches and ranks.

A mean of means is wrong where parts differ in size. Each mean carries its count instead, so that the aggregate does not depend on
how a batch was split. Quantiles have no such summary: ``Sample`` keeps all values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Reduce = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with the rule that merges it with values from other micro-batches and ranks.

    A mean carries its count, so that the mean over parts is the mean over the whole: ``token_mean`` counts tokens, ``seq_mean``
    sequences.
    """

    value: float
    reduce: Reduce
    count: float = 1.0

    @classmethod
    def token_mean(cls, values: Tensor, mask: Tensor) -> Metric:
        """Mean of ``values`` (T,) over tokens where ``mask`` (T,) is set; values outside the mask are ignored, even NaN."""
        count = float(mask.sum())
        # where(), not values * mask: 0 * NaN and 0 * inf are NaN.
        total = float(torch.where(mask != 0, values.detach().double(), 0.0).sum())
        return cls(total / count if count else 0.0, "mean", count)

    @classmethod
    def seq_mean(cls, values: Tensor) -> Metric:
        """Mean of ``values`` (B,), weighted by B."""
        return cls(float(values.detach().double().mean()) if len(values) else 0.0, "mean", float(len(values)))

    @classmethod
    def sum(cls, value: float | Tensor) -> Metric:
        return cls(float(value), "sum")

    @classmethod
    def max(cls, value: float | Tensor) -> Metric:
        return cls(float(value), "max")

    @classmethod
    def min(cls, value: float | Tensor) -> Metric:
        return cls(float(value), "min")

    def join(self, other: Metric) -> Metric:
        """Merge with a metric of the same ``reduce``."""
        assert self.reduce == other.reduce, f"cannot join {self.reduce} with {other.reduce}"
        count = self.count + other.count
        match self.reduce:
            case "mean":
                # Both parts may be empty: micro-batches without a trained token have count 0.
                value = (self.value * self.count + other.value * other.count) / count if count else 0.0
            case "sum":
                value = self.value + other.value
            case "max":
                value = max(self.value, other.value)
            case "min":
                value = min(self.value, other.value)
        return Metric(value, self.reduce, count)


@dataclass(frozen=True, slots=True)
class Sample:
    """All values of a quantity, kept for exact quantiles: quantiles of parts cannot be merged. values: float32 (N,)."""

    values: np.ndarray

    @classmethod
    def where(cls, values: Tensor, mask: Tensor) -> Sample:
        """Select ``values`` (T,) where ``mask`` (T,) is set."""
        return cls(values.detach()[mask.bool()].float().cpu().numpy())

    def quantiles(self, name: str) -> dict[str, float]:
        """Return ``name``_p01, _p50 and _p99; an empty dict if there are no values."""
        if not len(self.values):
            return {}
        values = self.values.copy()  # once: sorting it in part for one quantile serves the next
        return {f"{name}_p{percent:02d}": float(np.percentile(values, percent, overwrite_input=True)) for percent in (1, 50, 99)}


Metrics = dict[str, Metric | Sample]


def join_metrics(parts: Iterable[Mapping[str, Metric | Sample]]) -> Metrics:
    """Merge metrics by name over all parts, in the order of the parts (which fixes the rounding of sums)."""
    found: dict[str, list[Metric | Sample]] = {}
    for part in parts:
        for name, metric in part.items():
            found.setdefault(name, []).append(metric)
    return {name: _joined(values) for name, values in found.items()}


def plain_numbers(metrics: Mapping[str, Metric | Sample]) -> dict[str, float]:
    """Return the value of each metric and the quantiles of each sample; extremes and quantiles of empty sets are omitted."""
    numbers: dict[str, float] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Sample):
            numbers |= metric.quantiles(name)
        elif (metric.reduce, metric.value) not in (("max", float("-inf")), ("min", float("inf"))):
            numbers[name] = metric.value
    return numbers


def _joined(parts: Sequence[Metric | Sample]) -> Metric | Sample:
    numbers = [part for part in parts if isinstance(part, Metric)]
    samples = [part.values for part in parts if isinstance(part, Sample)]
    assert not (numbers and samples), "cannot join a number with a sample"
    # Samples at once: one after the other would copy the first of n parts n times.
    return reduce(Metric.join, numbers) if numbers else Sample(np.concatenate(samples))


def masked_extreme(values: Tensor, mask: Tensor, reduce: Literal["max", "min"]) -> Metric:
    """Largest or smallest of ``values`` (T,) where ``mask`` (T,) is set; -inf or inf, which merge neutrally, if it is empty."""
    neutral = float("-inf") if reduce == "max" else float("inf")
    chosen = torch.where(mask.bool(), values.detach(), torch.full_like(values, neutral))
    return Metric(float(chosen.max() if reduce == "max" else chosen.min()) if len(values) else neutral, reduce)
