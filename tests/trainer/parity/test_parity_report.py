"""The table and the page of synthetic responses."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.parity.made import EOS, made
from tests.trainer.parity.test_bounds import NO_BOS, engine_of
from tests.trainer.report.test_run_report import HOSTILE, Page
from trainer.parity.agreement import EngineResponses, Heads, agreement
from trainer.parity.bounds import Engine
from trainer.parity.measure import Measured, Timed
from trainer.parity.parity_report import (
    Parity,
    by_position,
    by_share,
    cumulative,
    page,
    plainest,
    plainest_first,
    survival,
)

FIRST = made([[5, 6, EOS], [7, EOS], [5, 5, 5, EOS]], offset=1e-6)
SECOND = made([[5, 6, EOS], [8, EOS], [5, 5, 6, EOS]], offset=1e-3, margin=0.5)
answer = st.lists(st.integers(3, 6), min_size=1, max_size=6)


def measured(answers: EngineResponses) -> Measured:
    timed = Timed(answers, seconds=1.0, cached=None)
    return Measured(timed, timed, start_seconds=1.0, sync_seconds=1.0, memory_without_bytes=1, memory_with_bytes=2)


def with_agreement(engine: Engine, first: EngineResponses, own: EngineResponses) -> Engine:
    return replace(engine, greedy=replace(engine.greedy, agreement=agreement(first, own)))


def parity(**changes: Any) -> Parity:
    second = with_agreement(engine_of(SECOND, SECOND), FIRST, SECOND)
    output: dict[str, Any] = {
        "model": HOSTILE, "dtype": "float32", "prompts": 3, "temperature": 0.8, "margin": 2e-4, "heads": NO_BOS,
        "engines": {"embedded": engine_of(FIRST, FIRST, z=0.5), "vllm": second}, "broken": [],
    }  # fmt: skip
    return Parity(**(output | changes))


def written(output: Parity) -> str:
    return page(output, {"embedded": measured(FIRST), "vllm": measured(SECOND)}, {"note": HOSTILE}, {"python": "3"})


def test_page_shows_problems_and_first_tokens_of_prompts() -> None:
    heads = Heads(bos="<s>", wanted=3, begun=2, doubled=0, lost=1)
    text = Page(written(parity(broken=["vllm: one", "vllm: two"], heads=heads))).text
    assert "2 bounds passed not equal" in text and "vllm: one vllm: two" in text
    assert "2 of 3 begin with <s>, 3 shall; 0 have it twice, 1 lost it." in text


def test_page_escapes_text_and_fetches_nothing() -> None:
    html = written(parity())
    assert "<script>alert" not in html and "<img" not in html and "http" not in html


def test_each_chart_has_a_line_per_engine() -> None:
    html = written(parity())
    charts = re.findall(r'<h3>([^<]*)</h3>.*?application/json">(.*?)</script>', html, re.DOTALL)
    lines = {title: json.loads(points) for title, points in charts}
    assert {title: len(found) for title, found in lines.items()} == {
        "|engine - trainer|, greedy": 2, "Along the answer, greedy": 2, "|engine - trainer|, sampled": 2,
        "Along the answer, sampled": 2,
        "Still the same": 1, "Lengths": 2,
    }  # fmt: skip
    assert [point[3] for point in lines["|engine - trainer|, greedy"][1]] == ["-3"] * 101
    assert html.count('data-x="at"') == 6


def test_shown_difference_is_the_one_with_the_widest_margin() -> None:
    assert plainest(agreement(FIRST, FIRST)) == "none"
    top = FIRST.top_log_probs.copy()
    top[5, 1] = -9.25  # of row 12, before its responses diverge
    top[7, 1] = -3.25
    wide = agreement(replace(FIRST, top_log_probs=top), SECOND)
    assert plainest(wide) == "margin 3 (row 12, token 2)"
    assert [found.uid for found in plainest_first(wide)] == [12, 11]


def test_page_of_a_greedy_pass_has_no_sampled_part() -> None:
    engines = {"embedded": engine_of(FIRST)}
    only = replace(measured(FIRST), sampled=None)
    html = page(parity(temperature=None, engines=engines), {"embedded": only}, {}, {})
    assert "sampled" not in Page(html).text and html.count('<div class="card chart">') == 3


def test_points_of_the_curves() -> None:
    assert survival(FIRST, SECOND) == ([0, 1, 2, 3, 4], [1.0, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert cumulative(FIRST.lengths) == ([0, 1, 2, 3, 4], [0, 0, 1 / 3, 2 / 3, 1])
    assert by_position(SECOND)[0] == [0, 1, 2, 3] and by_position(SECOND)[1] == pytest.approx([-3] * 4)
    assert by_share(made([[5]]))[1] == [-9.0] * 101  # no difference at all


@given(st.lists(st.tuples(answer, answer), min_size=1, max_size=5))
def test_curve_of_agreement_falls_to_the_fraction_of_equal_responses(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    first, second = (made([pair[i] for pair in pairs]) for i in range(2))
    _, shares = survival(first, second)
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(agreement(first, second).answers)
