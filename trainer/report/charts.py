"""Geometry of the report's charts: from numbers to what the template draws as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from trainer.tracking.formatting import number

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 430, 12, 192
LANES_WIDTH = 900
MAX_POINTS = 400
MOST_DOTS = 40
SMOOTH_FROM = 30
"""Points from which on a noisy curve is drawn faint, with its moving average over it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: label and its points by step; low and high draw a band. exact: never smoothed; dots: each point shown; color: its
    number, None: its place among the chart's curves."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    exact: bool = False
    dots: bool = False
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """An SVG path and how it looks; dots are circles on it; hover: what the pointer reads, [x, y, step, text] each."""

    label: str
    color: int
    path: str
    faint_path: str
    band: str
    dots: list[tuple[float, float]]
    hover: list[tuple[float, float, float, str]]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    note: str
    last: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a stack: x, width, and for each part y and height."""

    x: float
    width: float
    parts: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Stack:
    labels: list[str]
    columns: list[Column]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True, slots=True)
class Bar:
    """label: its index; told: what the pointer reads."""

    x: float
    y: float
    width: float
    label: int
    told: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """Bars on a common axis of time, a lane above the other. left, bottom: of the axes; names: of the lanes, at their tops;
    colors: of the labels, a number each."""

    left: int
    bottom: int
    height: int
    names: list[Tick]
    labels: list[str]
    colors: list[int]
    bars: list[Bar]
    x_ticks: list[Tick]


def draw(title: str, note: str, curves: Sequence[Curve], *, at_least: tuple[float, float] | None = None) -> Chart:
    """A line chart. at_least: a range that the y axis covers anyway. Points that are not finite are left out."""
    kept = [thin(curve) for curve in curves]
    shown = [value for curve in kept for values in (curve.values, curve.low or [], curve.high or []) for value in values]
    low, high = _padded(min(shown), max(shown)) if at_least is None else (min(at_least[0], *shown), max(at_least[1], *shown))
    steps = [step for curve in kept for step in curve.steps]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    y_ticks = nice_ticks(low, high)

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def path(xs: Sequence[float], ys: Sequence[float]) -> str:
        return "M" + "L".join(f"{x(step)} {y(value)}" for step, value in zip(xs, ys, strict=True))

    lines = []
    for place, curve in enumerate(kept):
        noisy = not curve.exact and len(curve.values) >= SMOOTH_FROM
        drawn = path(curve.steps, curve.values)
        band = ""
        if curve.low is not None and curve.high is not None:
            back = path(list(curve.steps)[::-1], list(curve.low)[::-1])
            band = f"{path(curve.steps, curve.high)}L{back[1:]}Z"
        points = list(zip(curve.steps, curve.values, strict=True))
        lines.append(
            Line(
                label=curve.label,
                color=place if curve.color is None else curve.color,
                path=path(curve.steps, smooth(curve.values)) if noisy else drawn,
                faint_path=drawn if noisy else "",
                band=band,
                dots=[(x(step), y(value)) for step, value in points] if curve.dots and len(points) <= MOST_DOTS else [],
                hover=[(x(step), y(value), step, number(value)) for step, value in points],
            )
        )
    return Chart(
        title,
        note,
        number(kept[0].values[-1]),
        lines,
        [Tick(x(at), number(at)) for at in whole_ticks(first, last)],
        [Tick(y(at), number(at)) for at in y_ticks],
    )


def stack(labels: Sequence[str], steps: Sequence[float], parts: Sequence[Sequence[float]], most: int = 60) -> Stack:
    """Columns of what each step is made of; parts[i]: the step's value for each label. Steps join into ``most`` columns."""
    size = -(-len(steps) // most)
    groups = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    means = [[sum(parts[i][k] for i in group) / len(group) for k in range(len(labels))] for group in groups]
    high = max(sum(mean) for mean in means) * 1.05 or 1.0
    pitch = (RIGHT - LEFT) / len(groups)
    columns = []
    for i, mean in enumerate(means):
        top, heights = float(BOTTOM), []
        for value in mean:
            height = (BOTTOM - TOP) * value / high
            top -= height
            heights.append((round(top, 2), round(height, 2)))
        columns.append(Column(round(LEFT + pitch * (i + 0.08), 2), round(pitch * 0.84, 2), heights))
    first, span = steps[0], max(steps[-1] - steps[0], 1)
    width = RIGHT - LEFT - pitch  # from the middle of the first column to that of the last
    x_ticks = [Tick(LEFT + pitch / 2 + width * (at - first) / span, number(at)) for at in whole_ticks(first, first + span)]
    y_ticks = [Tick(BOTTOM - (BOTTOM - TOP) * at / high, number(at)) for at in nice_ticks(0, high)]
    return Stack(list(labels), columns, x_ticks, y_ticks)


def lanes(spans: Sequence[tuple[str, str, float, float]], colors: Mapping[str, int], left: int = 90, height: int = 26) -> Lanes:
    """What ran when: (lane, label, start, end) in seconds each. Lanes and labels in the order in which they first come.

    colors: the numbers of labels that have one elsewhere; the others get the next ones.
    """
    names = list(dict.fromkeys(lane for lane, *_ in spans))
    labels = list(dict.fromkeys(label for _, label, *_ in spans))
    free = count(max(colors.values(), default=-1) + 1)
    first, last = min(start for *_, start, _ in spans), max(end for *_, end in spans)
    scale = (LANES_WIDTH - left - 10) / ((last - first) or 1.0)
    bars = [
        Bar(
            round(left + (start - first) * scale, 2),
            TOP + names.index(lane) * height,
            round((end - start) * scale, 2),
            labels.index(label),
            f"{label}: {start - first:.3f} to {end - first:.3f} s",
        )
        for lane, label, start, end in spans
    ]
    bottom = TOP + len(names) * height
    x_ticks = [Tick(round(left + at * scale, 2), number(at)) for at in nice_ticks(0.0, (last - first) or 1.0)]
    tops = [Tick(TOP + i * height, name) for i, name in enumerate(names)]
    numbers = [colors[label] if label in colors else next(free) for label in labels]
    return Lanes(left, bottom, height, tops, labels, numbers, bars, x_ticks)


def thin(curve: Curve) -> Curve:
    """Finite points only, at most MAX_POINTS: means of neighbours; lowest of low, highest of high."""
    keep = [i for i, value in enumerate(curve.values) if math.isfinite(value)]
    size = max(1, -(-len(keep) // MAX_POINTS))
    groups = [keep[start : start + size] for start in range(0, len(keep), size)]
    return Curve(
        curve.label,
        [curve.steps[group[-1]] for group in groups],
        [sum(curve.values[i] for i in group) / len(group) for group in groups],
        None if curve.low is None else [min(curve.low[i] for i in group) for group in groups],
        None if curve.high is None else [max(curve.high[i] for i in group) for group in groups],
        curve.exact,
        curve.dots,
        curve.color,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average, centred so that it does not lag, over about a twentieth of the curve."""
    reach = max(3, len(values) // 40)
    return [sum(window) / len(window) for i in range(len(values)) if (window := values[max(0, i - reach) : i + reach + 1])]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(unit for unit in (1, 2, 5, 10) if unit * power >= rough * 0.999) * power
    return [float(f"{i * unit:.12g}") for i in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def whole_ticks(first: float, last: float) -> list[float]:
    """Ticks at whole steps."""
    return [at for at in nice_ticks(first, last) if at == int(at)]


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < room * 4 else low - room), high + room
