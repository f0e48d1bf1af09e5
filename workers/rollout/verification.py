"""Weight verification: read back the engine's weights after a sync and compare them with the trainer's; see docs/rollout.md.

Problem: an engine's loader fuses, shards, casts and packs weights. A tensor that is dropped or misplaced there need not raise an
error, and the run would silently sample from another model than it trains. Comparing everything after each sync would gather
the trainer's weights twice and read the whole model.

Idea: the engine's weights are divided into lines. With verify_weights=sample each sync reads 1/TURNS of all lines, different ones
each time, and any TURNS consecutive syncs read every line once. The expected values are copied from the weight stream while it
passes, so there is no second copy of the model. Equality is bitwise unless an engine can only be probed with a computation.

Cost: 1/TURNS of the model in memory and reads per sync; an error in a single number is found after at most TURNS syncs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.base.keys import ConfigError

TURNS = 64  # syncs until every line has been read
CALL = 2**16  # fixed cost of reading one weight, in bytes that could be read and compared in the same time
AT_ONCE = 2**24  # bytes of a weight read at a time, when all lines are compared
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes per number: integer type of that width}, for bitwise comparison."""


class WeightMismatch(RuntimeError):
    """The engine's weights differ from the trainer's."""


class HeldWeight(ABC):
    """A tensor as the engine computes with it, divided into ``lines`` that can be read separately.

    names: the trainer's tensors that it consists of, one per part. line_bytes: bytes of a line over all parts. cost: relative
    cost of comparing a line. computed: the cost is one of computing instead of reading; the two are never added up.
    """

    names: tuple[str, ...]
    lines: int
    line_bytes: int
    cost: int
    computed = False

    @abstractmethod
    def expected(self, part: int, tensor: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | float]:
        """Expected values of lines [start, stop) of a part, and the tolerance of each number; both are copies.

        tensor: the trainer's tensor ``names[part]``.
        """

    @abstractmethod
    def read(self, start: int, stop: int) -> list[Tensor]:
        """Current values of lines [start, stop) of each part in the engine."""


class PlainWeight(HeldWeight):
    """A parameter (or rows of it) that equals the trainer's tensor (or a part of it) in the engine's dtype. A line is a row."""

    def __init__(
        self,
        name: str,
        held: Callable[[], Tensor],
        part: Callable[[Tensor], Tensor] = torch.atleast_1d,
        dtype: torch.dtype | None = None,
    ) -> None:
        """held: returns the engine's current tensor. part: selects the same numbers from the trainer's tensor. Both return views.

        dtype: the dtype in which the engine receives weights, if it keeps some parameters in a wider one.
        """
        self.names = (name,)
        self._held, self._part = held, part
        now = self.read(0, 2**62)[0]
        self.lines = len(now)
        self._dtype, self._taken_in = now.dtype, dtype or now.dtype
        self.line_bytes = now.nbytes // max(1, self.lines)
        self.cost = cost_of_reading(self.line_bytes, self.lines)

    def expected(self, part: int, tensor: Tensor, start: int, stop: int) -> tuple[Tensor, float]:
        rows = self._part(tensor.detach())
        if len(rows) != self.lines:
            raise ConfigError(
                f"actor_rollout_ref.rollout.verify_weights: the engine keeps {self.lines} rows of {self.names[0]}, and not "
                f"{len(rows)}; which is not known here. verify_weights=off leaves weights unproven"
            )
        rows = rows[start:stop]
        # A wider parameter holds the rounded number: round as the engine did on loading, then widen.
        if self._taken_in != self._dtype:
            rows = rows.to(self._taken_in)
        return rows.to(self._dtype, copy=True), 0.0

    def read(self, start: int, stop: int) -> list[Tensor]:
        return [torch.atleast_1d(self._held().detach())[start:stop]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines [start, stop) of a held weight."""

    held: HeldWeight
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.held.line_bytes


Read = Callable[[Sequence[Lines]], Iterable[list[Tensor]]]


def cost_of_reading(line_bytes: int, lines: int) -> int:
    """Cost of reading one line: its bytes plus its share of the weight's fixed cost CALL."""
    return line_bytes + CALL // max(1, lines)


def due(weights: Sequence[HeldWeight], turn: int) -> Iterator[Lines]:
    """Select the lines to read in this turn. Any TURNS consecutive turns read every line once, at about equal cost per turn.

    All lines are placed end to end on an axis of cost; a turn gets one contiguous interval of 1/TURNS of it. Contiguous, because
    every weight that is touched costs a call. A line belongs to the turn in which it begins.
    """
    # Reading and computing have separate axes: their costs are not comparable, and each turn should contain its share of both.
    for computed in (False, True):
        alike = [(held, held.lines * held.cost) for held in weights if held.computed == computed]
        whole = sum(cost for _, cost in alike)
        low, high = (whole * (turn % TURNS + i) // TURNS for i in range(2))
        for held, cost in alike:
            if low < cost and high > 0:  # rounded up at both ends: a line that begins before ``low`` belongs to an earlier turn
                start, stop = (min(max(0, -(-bound // held.cost)), held.lines) for bound in (low, high))
                if start < stop:
                    yield Lines(held, start, stop)
            low, high = low - cost, high - cost  # relative to the beginning of the next weight


def everything(held: HeldWeight) -> Iterator[Lines]:
    """All lines of a weight, about AT_ONCE bytes at a time."""
    step = max(1, AT_ONCE // max(1, held.line_bytes))
    for start in range(0, held.lines, step):
        yield Lines(held, start, min(start + step, held.lines))


class Findings:
    """Accumulated result of comparisons. nbytes: bytes of the engine's weights that were compared."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.wrong: dict[str, tuple[int, int, float]] = {}
        """{trainer's name: (numbers that differ, numbers compared, largest difference)}"""

    def compare(self, name: str, got: Tensor, want: Tensor, slack: Tensor | float) -> None:
        """Compare one tensor; differences up to ``slack`` are accepted, and NaN equals NaN."""
        if same_bits(got, want):
            return
        # At least float32: a difference in bfloat16 would itself be rounded.
        wide = torch.promote_types(got.dtype, torch.float32)
        difference = (got.to(wide) - want.to(wide)).abs()
        # Negated, so that a NaN difference counts as wrong: every comparison with NaN is false.
        off = ~(difference <= slack) & ~(got.isnan() & want.isnan())
        if off.any():
            count, read, by = self.wrong.get(name, (0, 0, 0.0))
            worst = float(difference[off].nan_to_num(torch.inf).max())
            self.wrong[name] = count + int(off.sum()), read + off.numel(), max(by, worst)

    def raise_if_wrong(self, version: int, engine: str, rank: int) -> None:
        """Raises WeightMismatch, naming the first tensor that differs."""
        if not self.wrong:
            return
        name, (count, read, by) = next(iter(self.wrong.items()))
        others = f"; {len(self.wrong)} tensors are off in all" if len(self.wrong) > 1 else ""
        raise WeightMismatch(
            f"{name} in {engine} on rank {rank} is not the trainer's, weights of version {version}: {count} of {read} numbers "
            f"read are off, by {by:.3g} at most{others}"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Fast path: whether two tensors are bitwise identical. False does not imply that numbers differ (dtype, -0.0).

    On CPU numpy compares: 5 (float32) to 9 (bfloat16) times as fast as torch.equal within the processor's cache, 1.5 to 2.4 times
    outside of it.
    """
    if one.dtype != other.dtype:
        return False
    one, other = (tensor.view(WORDS[tensor.itemsize]) for tensor in (one, other))
    return torch.equal(one, other) if one.is_cuda else np.array_equal(one.numpy(), other.numpy())


class WeightSample:
    """The lines of one turn: expected values are copied from the stream, and compared once the engine has loaded."""

    def __init__(self, lines: Sequence[Lines]) -> None:
        self._lines = lines
        self._wanted: dict[tuple[int, int], tuple[Tensor, Tensor | float]] = {}
        self._places = places_of([chosen.held for chosen in lines])
        self.names = self._places.keys()

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy what this turn needs of one tensor of the stream."""
        for i, part in self._places.get(name, ()):
            chosen = self._lines[i]
            self._wanted[i, part] = chosen.held.expected(part, tensor, chosen.start, chosen.stop)

    def compare(self, found: Findings, read: Read) -> None:
        """Read the lines from the engine and compare; each expected value is released once it was used."""
        for i, (chosen, got) in enumerate(zip(self._lines, read(self._lines), strict=True)):
            found.nbytes += chosen.nbytes
            for part, name in enumerate(chosen.held.names):
                found.compare(name, got[part], *self._wanted.pop((i, part)))


def compare_all(weights: Sequence[HeldWeight], stream: Iterator[tuple[str, Tensor]], found: Findings, read: Read) -> None:
    """Compare every line with a second stream of the trainer's tensors. A fused weight waits until all its parts have arrived."""
    places = places_of(weights)
    came: list[dict[int, Tensor]] = [{} for _ in weights]
    for name, tensor in stream:
        for i, part in places.get(name, ()):
            held, parts = weights[i], came[i]
            parts[part] = tensor
            if len(parts) < len(held.names):
                continue
            for lines in everything(held):
                (values,) = read([lines])
                found.nbytes += lines.nbytes
                for k, got in enumerate(values):
                    found.compare(held.names[k], got, *held.expected(k, parts[k], lines.start, lines.stop))
            parts.clear()  # releases the gathered tensors before the stream yields the next one


def compare_identity(weights: Sequence[HeldWeight], shared: Mapping[str, Tensor], found: Findings) -> None:
    """Verify shared weights: the engine's tensors must be the trainer's own (same address, shape and dtype)."""
    for held in weights:
        for name, got in zip(held.names, held.read(0, held.lines), strict=True):
            source = shared[name]
            if (got.data_ptr(), got.shape, got.dtype) == (source.data_ptr(), torch.atleast_1d(source).shape, source.dtype):
                found.nbytes += got.nbytes
            else:
                found.wrong[name] = got.numel(), got.numel(), math.inf


def places_of(weights: Sequence[HeldWeight]) -> dict[str, list[tuple[int, int]]]:
    """Index by trainer's name: {name: [(index of a held weight, part of it), ...]}."""
    places: dict[str, list[tuple[int, int]]] = {}
    for i, held in enumerate(weights):
        for part, name in enumerate(held.names):
            places.setdefault(name, []).append((i, part))
    return places


def check_places(weights: Sequence[HeldWeight], came: Collection[str]) -> None:
    """Raises ValueError unless the trainer's tensors and the names of held weights match one to one.

    Ranks without held weights are skipped. came: names of the trainer's tensors in the stream.
    """
    known = {name for held in weights for name in held.names}
    if weights and (unknown := sorted(known ^ set(came))):
        raise ConfigError(
            f"actor_rollout_ref.rollout.verify_weights: it is not known where the engine keeps {', '.join(unknown[:3])} "
            f"({len(unknown)} in all); verify_weights=off leaves all unproven"
        )
