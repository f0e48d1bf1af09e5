"""Proof, read on the engine's side, that it computes with the trainer's weights; see docs/rollout.md.

What an engine holds is cut into lines. In a sample, a sync reads some lines of it, others each time, and all of them within
TURNS syncs. What they must be is taken from the stream while it goes by, so there is no second copy of the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TURNS = 64
CALL = 2**16  # bytes that are read and compared while a weight is looked at
AT_ONCE = 2**24  # bytes of a weight, when all are read
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a number of so many bytes."""


class WeightMismatch(RuntimeError):
    """The engine does not hold what the trainer has."""


class HeldWeight(ABC):
    """A tensor of an engine as the engine computes with it, cut into ``lines`` that can be read.

    names: the trainer's tensors it is made of, one for each part. line_bytes: of a line of all parts. cost: of comparing a line;
    computed: it is the cost of computing, else of reading. The two are not weighed against each other.
    """

    names: tuple[str, ...]
    lines: int
    line_bytes: int
    cost: int
    computed = False

    @abstractmethod
    def expected(self, part: int, tensor: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | float]:
        """What lines [start, stop) of this part must be if the trainer's tensor ``names[part]`` is ``tensor``, and how far
        off rounding may put each number. Copies."""

    @abstractmethod
    def read(self, start: int, stop: int) -> list[Tensor]:
        """Lines [start, stop) of each part, as the engine holds them now."""


class PlainWeight(HeldWeight):
    """A parameter, or some rows of it, that equals the trainer's tensor, or a part of it, in the engine's dtype."""

    def __init__(
        self,
        name: str,
        held: Callable[[], Tensor],
        part: Callable[[Tensor], Tensor] = torch.atleast_1d,
        dtype: torch.dtype | None = None,
    ) -> None:
        """held: the engine's numbers, now; part: where in the trainer's tensor they are. Both give views, of one shape.

        dtype: which the engine takes weights in, if some parameters are wider.
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
            raise ValueError(
                f"actor_rollout_ref.rollout.verify_weights: the engine keeps {self.lines} rows of {self.names[0]}, and not "
                f"{len(rows)}; which is not known here. verify_weights=off leaves weights unproven"
            )
        rows = rows[start:stop]
        if self._taken_in != self._dtype:
            rows = rows.to(self._taken_in)
        return rows.to(self._dtype, copy=True), 0.0

    def read(self, start: int, stop: int) -> list[Tensor]:
        return [torch.atleast_1d(self._held().detach())[start:stop]]


@dataclass(frozen=True, slots=True)
class Lines:
    """[start, stop) of a held weight."""

    held: HeldWeight
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.held.line_bytes


Read = Callable[[Sequence[Lines]], Iterable[list[Tensor]]]


def cost_of_reading(line_bytes: int, lines: int) -> int:
    """Of each line: its bytes, and its share of the call."""
    return line_bytes + CALL // max(1, lines)


def due(weights: Sequence[HeldWeight], turn: int) -> Iterator[Lines]:
    """What is read in this turn. Any TURNS turns in a row read every line of every weight once, and cost much the same each.

    A turn has a TURNS-th of the cost in one piece: few weights, for each is a call. A line is read in the turn that its beginning
    falls into.
    """
    for computed in (False, True):
        alike = [(held, held.lines * held.cost) for held in weights if held.computed == computed]
        whole = sum(cost for _, cost in alike)
        low, high = (whole * (turn % TURNS + i) // TURNS for i in range(2))
        for held, cost in alike:
            if low < cost and high > 0:
                start, stop = (min(max(0, -(-bound // held.cost)), held.lines) for bound in (low, high))
                if start < stop:
                    yield Lines(held, start, stop)
            low, high = low - cost, high - cost


def everything(held: HeldWeight) -> Iterator[Lines]:
    step = max(1, AT_ONCE // max(1, held.line_bytes))
    for start in range(0, held.lines, step):
        yield Lines(held, start, min(start + step, held.lines))


class Findings:
    """What comparing has found so far. nbytes: of the engine's weights, compared."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.wrong: dict[str, tuple[int, int, float]] = {}
        """{trainer's name: (numbers that are off, numbers read, by how much at most)}"""

    def compare(self, name: str, got: Tensor, want: Tensor, slack: Tensor | float) -> None:
        if same_bits(got, want):
            return
        wide = torch.promote_types(got.dtype, torch.float32)
        difference = (got.to(wide) - want.to(wide)).abs()
        off = ~(difference <= slack) & ~(got.isnan() & want.isnan())
        if off.any():
            count, read, by = self.wrong.get(name, (0, 0, 0.0))
            worst = float(difference[off].nan_to_num(torch.inf).max())
            self.wrong[name] = count + int(off.sum()), read + off.numel(), max(by, worst)

    def raise_if_wrong(self, version: int, engine: str, rank: int) -> None:
        if not self.wrong:
            return
        name, (count, read, by) = next(iter(self.wrong.items()))
        others = f"; {len(self.wrong)} tensors are off in all" if len(self.wrong) > 1 else ""
        raise WeightMismatch(
            f"{name} in {engine} on rank {rank} is not the trainer's, weights of version {version}: {count} of {read} numbers "
            f"read are off, by {by:.3g} at most{others}"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """False proves nothing. On CPU numpy compares, 5 (float32) to 9 (bfloat16) times as fast as torch.equal in the processor's
    cache, 1.5 to 2.4 times outside of it."""
    if one.dtype != other.dtype:
        return False
    one, other = (tensor.view(WORDS[tensor.itemsize]) for tensor in (one, other))
    return torch.equal(one, other) if one.is_cuda else np.array_equal(one.numpy(), other.numpy())


class WeightSample:
    """One turn's lines, taken from the stream on the way, and read from the engine when it has loaded."""

    def __init__(self, lines: Sequence[Lines]) -> None:
        self._lines = lines
        self._wanted: dict[tuple[int, int], tuple[Tensor, Tensor | float]] = {}
        self._places = places_of([chosen.held for chosen in lines])
        self.names = self._places.keys()

    def take(self, name: str, tensor: Tensor) -> None:
        for i, part in self._places.get(name, ()):
            chosen = self._lines[i]
            self._wanted[i, part] = chosen.held.expected(part, tensor, chosen.start, chosen.stop)

    def compare(self, found: Findings, read: Read) -> None:
        for i, (chosen, got) in enumerate(zip(self._lines, read(self._lines), strict=True)):
            found.nbytes += chosen.nbytes
            for part, name in enumerate(chosen.held.names):
                found.compare(name, got[part], *self._wanted.pop((i, part)))


def compare_all(weights: Sequence[HeldWeight], stream: Iterator[tuple[str, Tensor]], found: Findings, read: Read) -> None:
    """Every line, with a second stream of the trainer's tensors. A weight of several parts waits until all have come."""
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
            parts.clear()


def compare_identity(weights: Sequence[HeldWeight], shared: Mapping[str, Tensor], found: Findings) -> None:
    """Where the engine works with the trainer's own tensors, they are equal because they are the same."""
    for held in weights:
        for name, got in zip(held.names, held.read(0, held.lines), strict=True):
            theirs = shared[name]
            if (got.data_ptr(), got.shape, got.dtype) == (theirs.data_ptr(), torch.atleast_1d(theirs).shape, theirs.dtype):
                found.nbytes += got.nbytes
            else:
                found.wrong[name] = got.numel(), got.numel(), math.inf


def places_of(weights: Sequence[HeldWeight]) -> dict[str, list[tuple[int, int]]]:
    """{trainer's name: (which weight, which part of it), for all it is in}."""
    places: dict[str, list[tuple[int, int]]] = {}
    for i, held in enumerate(weights):
        for part, name in enumerate(held.names):
            places.setdefault(name, []).append((i, part))
    return places


def check_places(weights: Sequence[HeldWeight], came: Collection[str]) -> None:
    """On a rank that holds any, every tensor of the trainer has its place, and the other way round. Raises ValueError."""
    known = {name for held in weights for name in held.names}
    if weights and (unknown := sorted(known ^ set(came))):
        raise ValueError(
            f"actor_rollout_ref.rollout.verify_weights: it is not known where the engine keeps {', '.join(unknown[:3])} "
            f"({len(unknown)} in all); verify_weights=off leaves all unproven"
        )
