"""Metrics that aggregate exactly over micro-batches and ranks.

A mean of means is wrong where parts differ in size. Each mean carries its count instead, so that the aggregate does not depend on
how a batch was split. Quantiles have no such summary: ``Sample`` keeps all values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    sequences. Numbers of a micro-batch on a GPU stay there, as float64 scalars, until ``join_metrics`` reads them all at once:
    reading one waits for everything that the GPU still has to do.
    """

    value: float | Tensor
    reduce: Reduce
    count: float | Tensor = 1.0

    @classmethod
    def token_mean(cls, values: Tensor, mask: Tensor) -> Metric:
        """Mean of ``values`` (T,) over tokens where ``mask`` (T,) is set; values outside the mask are ignored, even NaN."""
        count = mask.sum().double()
        # where(), not values * mask: 0 * NaN and 0 * inf are NaN.
        total = torch.where(mask != 0, values.detach().double(), 0.0).sum()
        return cls(_read_later(torch.where(count != 0, total / count, 0.0)), "mean", _read_later(count))

    @classmethod
    def seq_mean(cls, values: Tensor) -> Metric:
        """Mean of ``values`` (B,), weighted by B."""
        return cls(_read_later(values.detach().double().mean()) if len(values) else 0.0, "mean", float(len(values)))

    @classmethod
    def sum(cls, value: float | Tensor) -> Metric:
        return cls(_read_later(value), "sum")

    @classmethod
    def max(cls, value: float | Tensor) -> Metric:
        return cls(_read_later(value), "max")

    @classmethod
    def min(cls, value: float | Tensor) -> Metric:
        return cls(_read_later(value), "min")

    def join(self, other: Metric) -> Metric:
        """Merge with a metric of the same ``reduce``; both have numbers, not tensors."""
        assert not any(isinstance(number, Tensor) for number in (self.value, self.count, other.value, other.count))
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
    """All values of a quantity, kept for exact quantiles: quantiles of parts cannot be merged. values: float32 (N,).

    On a GPU all tokens (T,) and a mask (T,), until ``join_metrics`` reads them.
    """

    values: np.ndarray | Tensor
    mask: Tensor | None = None

    @classmethod
    def where(cls, values: Tensor, mask: Tensor) -> Sample:
        """Select ``values`` (T,) where ``mask`` (T,) is set."""
        sample = cls(values.detach().float(), mask.bool())
        return sample if _stays(values) else sample.read()

    def read(self) -> Sample:
        """The same with selected values on the CPU."""
        if not isinstance(self.values, Tensor):
            return self
        assert self.mask is not None
        return Sample(self.values.cpu()[self.mask.cpu()].numpy())

    def quantiles(self, name: str) -> dict[str, float]:
        """Return ``name``_p01, _p50 and _p99; an empty dict if there are no values."""
        read = self.read().values
        if not len(read):
            return {}
        values = np.array(read)  # once: sorting it in part for one quantile serves the next
        return {f"{name}_p{percent:02d}": float(np.percentile(values, percent, overwrite_input=True)) for percent in (1, 50, 99)}


Metrics = dict[str, Metric | Sample]


def join_metrics(parts: Iterable[Mapping[str, Metric | Sample]]) -> Metrics:
    """Merge metrics by name over all parts, in the order of the parts (which fixes the rounding of sums)."""
    found: dict[str, list[Metric | Sample]] = {}
    for part in _read(parts):
        for name, metric in part.items():
            found.setdefault(name, []).append(metric)
    return {name: _joined(values) for name, values in found.items()}


def _stays(value: Tensor) -> bool:
    """Whether a value is read later, with all others of its step."""
    return value.is_cuda


def _read_later(number: float | Tensor) -> float | Tensor:
    """A float; on a GPU a float64 scalar, which ``_read`` turns into one."""
    return number.detach().double() if isinstance(number, Tensor) and _stays(number) else float(number)


def _read(parts: Iterable[Mapping[str, Metric | Sample]]) -> list[dict[str, Metric | Sample]]:
    """The same metrics with floats. All scalars, which are on one device, are read in one copy."""
    read = [{name: one.read() if isinstance(one, Sample) else one for name, one in part.items()} for part in parts]
    waiting = [
        (part, name, field, number)
        for part in read
        for name, metric in part.items()
        if isinstance(metric, Metric)
        for field, number in (("value", metric.value), ("count", metric.count))
        if isinstance(number, Tensor)
    ]
    if waiting:
        for (part, name, field, _), number in zip(waiting, torch.stack([each[3] for each in waiting]).tolist(), strict=True):
            part[name] = replace(part[name], **{field: number})
    return read


def plain_numbers(metrics: Mapping[str, Metric | Sample]) -> dict[str, float]:
    """Return the value of each metric and the quantiles of each sample; those of empty sets, other than sums, are omitted."""
    numbers: dict[str, float] = {}
    (metrics,) = _read([metrics])
    for name, metric in metrics.items():
        if isinstance(metric, Sample):
            numbers |= metric.quantiles(name)
        elif metric.reduce == "mean" and not metric.count:
            continue
        elif (metric.reduce, metric.value) not in (("max", float("-inf")), ("min", float("inf"))):
            numbers[name] = float(metric.value)
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
    return Metric(_read_later(chosen.max() if reduce == "max" else chosen.min()) if len(values) else neutral, reduce)
