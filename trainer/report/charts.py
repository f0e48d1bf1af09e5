"""Geometry of the report's charts: pure functions from numbers to the coordinates that the template draws as SVG.

All coordinates are in SVG units with the origin at the top left: y grows downwards, so large values have a small y.
"""

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
"""Number of points from which a noisy curve is drawn faint, under its moving average."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Data of one line of a chart.

    steps, values: coordinates of its points. low, high: bounds of a band around it. exact: never smoothed. dots: mark each point.
    color: index of its colour; None: its position among the curves of the chart.
    """

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
    """A label at a coordinate of an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line as drawn.

    path, faint_path, band: SVG paths, "" for none. dots: centres of circles. hover: (x, y, step, text) of each point, shown at
    the pointer.
    """

    label: str
    color: int
    path: str
    faint_path: str
    band: str
    dots: list[tuple[float, float]]
    hover: list[tuple[float, float, float, str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart as drawn. note: below the title. last: the last value of the first curve."""

    title: str
    note: str
    last: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a stacked chart. parts: (y, height) of each label."""

    x: float
    width: float
    parts: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Stack:
    """A chart of stacked columns as drawn."""

    labels: list[str]
    columns: list[Column]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a lane. label: index into ``Lanes.labels``. The last field is the text shown at the pointer."""

    x: float
    y: float
    width: float
    label: int
    tooltip: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """Bars in lanes over a common time axis.

    left, bottom: position of the axes. height: of a lane. names: of the lanes, at their upper edges. colors: index of the colour
    of each label.
    """

    left: int
    bottom: int
    height: int
    names: list[Tick]
    labels: list[str]
    colors: list[int]
    bars: list[Bar]
    x_ticks: list[Tick]


def draw(title: str, note: str, curves: Sequence[Curve], *, at_least: tuple[float, float] | None = None) -> Chart:
    """Lay out a line chart. at_least: range that the y axis covers in any case. Points that are not finite are left out."""
    kept = [thin(curve) for curve in curves]
    shown = [value for curve in kept for values in (curve.values, curve.low or [], curve.high or []) for value in values]
    low, high = _padded(min(shown), max(shown)) if at_least is None else (min(at_least[0], *shown), max(at_least[1], *shown))
    steps = [step for curve in kept for step in curve.steps]
    first, last = min(steps), max(max(steps), min(steps) + 1)  # at least one step wide: x() divides by the difference
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
            # A closed polygon: along the upper bound, and back along the lower one. back[1:] drops the "M" that starts a path.
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
    """Lay out stacked columns, at most ``most``; neighbouring steps are averaged into one column.

    parts[i]: value of each label in steps[i].
    """
    size = -(-len(steps) // most)
    groups = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    means = [[sum(parts[i][k] for i in group) / len(group) for k in range(len(labels))] for group in groups]
    # 5 % of room above the highest column; 1.0 avoids a division by zero if everything is 0.
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
    """Lay out bars (lane, label, start, end), in seconds. Lanes and labels are in order of their first occurrence.

    colors: {label: index of its colour} of labels that another chart of the page shows too; other labels get the next free ones.
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
    """Reduce a curve to at most MAX_POINTS finite points: means of neighbours, with the extremes of their bands."""
    # The page contains every point: this bounds its size for long runs.
    keep = [i for i, value in enumerate(curve.values) if math.isfinite(value)]
    size = max(1, -(-len(keep) // MAX_POINTS))
    groups = [keep[start : start + size] for start in range(0, len(keep), size)]
    return Curve(
        curve.label,
        [curve.steps[group[-1]] for group in groups],  # at the last step of each group, so that the curve ends at the last step
        [sum(curve.values[i] for i in group) / len(group) for group in groups],
        None if curve.low is None else [min(curve.low[i] for i in group) for group in groups],
        None if curve.high is None else [max(curve.high[i] for i in group) for group in groups],
        curve.exact,
        curve.dots,
        curve.color,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average over about a twentieth of the curve, centred so that it does not lag; the window shrinks at both ends."""
    reach = max(3, len(values) // 40)
    return [sum(window) / len(window) for i in range(len(values)) if (window := values[max(0, i - reach) : i + reach + 1])]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], approximately ``about`` of them."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(unit for unit in (1, 2, 5, 10) if unit * power >= rough * 0.999) * power
    # Twelve digits remove the rounding of i * unit (0.30000000000000004). 1e-9 keeps a tick that rounding puts just outside.
    return [float(f"{i * unit:.12g}") for i in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def whole_ticks(first: float, last: float) -> list[float]:
    """Ticks at integers: a short run must not show half steps."""
    return [at for at in nice_ticks(first, last) if at == int(at)]


def _padded(low: float, high: float) -> tuple[float, float]:
    """Range of the y axis: some room around [low, high], down to 0 if low is near it."""
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < room * 4 else low - room), high + room
