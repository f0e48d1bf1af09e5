import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report.charts import (
    BOTTOM,
    LANES_WIDTH,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    Curve,
    draw,
    lanes,
    nice_ticks,
    smooth,
    stack,
    thin,
)
from trainer.tracking.formatting import duration, number


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=50))
def test_any_curve_lies_within_its_axes(values: list[float]) -> None:
    chart = draw("", "", [Curve("c", range(len(values)), values, exact=True)])
    for x, y, _, _ in chart.lines[0].hover:
        assert LEFT <= x <= RIGHT and TOP - 0.1 <= y <= BOTTOM + 0.1
    assert all(TOP - 0.1 <= tick.at <= BOTTOM + 0.1 for tick in chart.y_ticks)


def test_values_rise_upwards_and_steps_to_the_right() -> None:
    (low, high) = draw("", "", [Curve("c", [1, 2], [0.2, 0.8])], at_least=(0.0, 1.0)).lines[0].hover
    assert low[:2] == (LEFT, pytest.approx(BOTTOM - 0.2 * (BOTTOM - TOP)))
    assert high[:2] == (RIGHT, pytest.approx(BOTTOM - 0.8 * (BOTTOM - TOP)))


def test_band_is_a_closed_polygon() -> None:
    band = draw("", "", [Curve("c", [1, 2], [2.0, 2.0], low=[1.0, 1.0], high=[3.0, 3.0])]).lines[0].band
    xs = [float(x) for x, _ in re.findall(r"(-?[\d.]+) (-?[\d.]+)", band)]
    assert xs == [LEFT, RIGHT, RIGHT, LEFT] and band.endswith("Z")


def test_noisy_curves_are_smoothed_exact_ones_never() -> None:
    steps, values = range(100), [float(i % 2) for i in range(100)]
    (noisy,) = draw("", "", [Curve("c", steps, values)]).lines
    (exact,) = draw("", "", [Curve("c", steps, values, exact=True)]).lines
    assert noisy.faint_path == exact.path != noisy.path
    assert exact.faint_path == ""


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=120))
def test_smoothing_stays_within_the_values(values: list[float]) -> None:
    assert len(smooth(values)) == len(values)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in smooth(values))


def test_smoothing_does_not_lag() -> None:
    line = [float(i) for i in range(100)]
    assert smooth(line)[10:90] == pytest.approx(line[10:90])


def test_long_curves_are_thinned_and_nonfinite_values_excluded() -> None:
    values = [1.0] * 10_000
    values[17], values[18] = float("nan"), float("inf")
    curve = thin(Curve("c", range(10_000), values, low=[0.0] * 9_999 + [-5.0], high=values))
    assert len(curve.values) <= MAX_POINTS and curve.steps[-1] == 9_999
    assert set(curve.values) == {1.0} and curve.low is not None and min(curve.low) == -5.0


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_a_few_and_within(low: float, span: float) -> None:
    high = low + max(span, abs(low) * 1e-6)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in ticks)


def test_columns_of_a_stack_are_stacked() -> None:
    steps = range(1, 151)
    drawn = stack(["gen", "update"], steps, [[1.0, 3.0]] * 150)
    assert len(drawn.columns) == 50  # three steps each
    for column in drawn.columns:
        (gen_y, gen_height), (update_y, update_height) = column.parts
        assert gen_y + gen_height == pytest.approx(BOTTOM, abs=0.02)
        assert update_y + update_height == pytest.approx(gen_y, abs=0.02)
        assert update_height == pytest.approx(3 * gen_height, abs=0.05)
        assert column.x >= LEFT and column.x + column.width <= RIGHT


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.88251, "0.883"), (7, "7"), (1234.5, "1234"), (26_400, "26.4k"), (7.17e6, "7.17M"), (3e9, "3G"), (3e-4, "3e-4"),
     (-1.2e-5, "-1.2e-5"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.13, "42.1 s"), (200, "3 min 20 s"), (18_450, "5 h 7 min"), (3599.9, "1 h 0 min")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_bars_lie_in_their_lane_at_their_time() -> None:
    drawn = lanes([("a", "gen", 10.0, 12.0), ("b", "values", 11.0, 14.0), ("a", "ref", 12.0, 14.0)], {"ref": 0, "gen": 5})
    assert drawn.colors == [5, 6, 0]
    assert [(name.label, name.at) for name in drawn.names] == [("a", TOP), ("b", TOP + drawn.height)]
    assert drawn.labels == ["gen", "values", "ref"] and drawn.bottom == TOP + 2 * drawn.height
    gen, values, ref = drawn.bars
    unit = (LANES_WIDTH - 10 - drawn.left) / 4
    assert [(bar.x, bar.width) for bar in (gen, values, ref)] == [
        (drawn.left, pytest.approx(2 * unit)), (pytest.approx(drawn.left + unit), pytest.approx(3 * unit)),
        (pytest.approx(drawn.left + 2 * unit), pytest.approx(2 * unit)),
    ]  # fmt: skip
    assert (gen.y, values.y, ref.y) == (TOP, TOP + drawn.height, TOP)
    assert values.tooltip == "values: 1.000 to 4.000 s" and [tick.label for tick in drawn.x_ticks][:2] == ["0", "1"]
    assert lanes([("a", "gen", 1.0, 1.0)], {}).bars[0].width == 0.0
