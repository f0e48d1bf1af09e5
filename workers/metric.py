"""Metrics that add up exactly, however a batch was cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that knows how to join its like from other micro-batches and ranks.

    A mean carries its count, so that the mean over parts is the mean over the whole: ``token_mean`` counts tokens,
    ``seq_mean`` sequences.
    """

    value: float
    reduce: Reduce
    count: float = 1.0

    @classmethod
    def token_mean(cls, values: Tensor, mask: Tensor) -> Metric:
        """The mean of ``values`` (T,) over tokens where ``mask`` (T,) is set."""
        count = float(mask.sum())
        total = float((values.detach().double() * mask).sum())
        return cls(total / count if count else 0.0, "mean", count)

    @classmethod
    def seq_mean(cls, values: Tensor) -> Metric:
        """The mean of ``values`` (B,)."""
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
        assert self.reduce == other.reduce, f"cannot join {self.reduce} with {other.reduce}"
        count = self.count + other.count
        match self.reduce:
            case "mean":
                value = (self.value * self.count + other.value * other.count) / count if count else 0.0
            case "sum":
                value = self.value + other.value
            case "max":
                value = max(self.value, other.value)
            case "min":
                value = min(self.value, other.value)
        return Metric(value, self.reduce, count)


def join_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One metric a name, over all parts. The order of the parts is the order of the sums."""
    joined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name].join(metric) if name in joined else metric
    return joined


def masked_extreme(values: Tensor, mask: Tensor, reduce: Literal["max", "min"]) -> Metric:
    """Largest or smallest of ``values`` (T,) under ``mask`` (T,); an empty mask is neutral."""
    neutral = float("-inf") if reduce == "max" else float("inf")
    chosen = torch.where(mask.bool(), values.detach(), torch.full_like(values, neutral))
    return Metric(float(chosen.max() if reduce == "max" else chosen.min()) if len(values) else neutral, reduce)
