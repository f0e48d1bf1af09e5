import logging
import signal
import threading
import time
from fractions import Fraction

import math_verify
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.rewards.rules.math import LIMITS, equivalent, is_cheap, last_boxed, same, score, spelt, value_of, values
from trainer.rewards.sandbox.forkserver import fork_server

SAME = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", r"\dfrac{1}{2}"),
    ("1/2", r"\frac{2}{4}"),
    (r"1\frac12", "1.5"),
    ("x^2+1", "1+x^2"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\sqrt3", r"\sqrt{12}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\left( 1, 2 \right]", "(1,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("y = 2x+3", "2x+3"),
    (r"50\%", "50"),
    ("1,000", "1000"),
    (r"90^\circ", "90"),
    (r"10\text{ cm}^2", "10"),
    (r"\$18.90", "18.9"),
    (r"\text{Evelyn}", "Evelyn"),
    ("11_2", "11_{2}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\pi/4", r"\frac{\pi}{4}"),
    ("5.", "5"),
    ("6 3/4", r"\frac{27}{4}"),
    ("x=6 3/4", "27/4"),
    ("k=7", "7"),
    ("n = 7", "n=7"),
    ("1-1/2", "0.5"),
    (r"\frac 1 2", "1/2"),
    (r"1\,234", "1234"),
    ("0,111", "0.111"),  # a decimal comma, as math-verify reads it
]
DIFFERENT = [
    ("3", "4"),
    ("x+1", "x+2"),
    ("2x", "2"),
    ("(3,4)", "(4,3)"),
    ("0.333333", r"\frac{1}{3}"),  # to six digits is not equal
    ("(1,200)", "(1200)"),
    (r"5\text{ or }6", "5"),
    ("", "5"),
    ("", "x"),
    ("6 3/4", "63/4"),
    ("3 1/2", r"\frac{31}{2}"),
    ("1-1/2", "3/2"),
    ("5 6", "56"),
    (r"5\quad 6", "56"),
    (r"5\text{ }6", "56"),
    (r"5^\circ 6", "56"),
    ("5$ $6", "56"),
    ("5 .6", "5.6"),
    ("2 3x", "23x"),
    ("1, 234", "1234"),
    ("1234,567", "1234567"),
    ("0,500", "500"),
    ("00,500", "500"),
    ("x=3", "y=3"),
    ("x=1/2", "y=1/2"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_equivalent_answers_score_one(answer: str, truth: str) -> None:
    assert score(f"so $\\boxed{{{answer}}}$.", truth) == 1.0
    assert score(f"so $\\boxed{{{truth}}}$.", answer) == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_score_zero(answer: str, truth: str) -> None:
    assert score(f"so $\\boxed{{{answer}}}$.", truth) == 0.0


def test_only_the_last_box_counts() -> None:
    assert score(r"\boxed{5} no, \boxed{6}", "5") == 0.0
    assert score("it is 5", "5") == 0.0


def test_the_ground_truth_may_be_a_solution() -> None:
    assert score(r"\boxed{0.5}", r"Half of one is $\boxed{\frac{1}{2}}$.") == 1.0
    with pytest.raises(ValueError, match="ground truth is empty"):
        score(r"\boxed{5}", " ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\left( 1,\ 2 \right)", "(1,2)"),
        (r"\tfrac{3}{4}", r"\frac34"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("3/4", r"\frac{3}{4}"),
        (r"12\text{ miles}", "12"),
        (r"\textbf{(B)}", "(B)"),
        ("1,000", "1000"),
    ],
)
def test_equivalent_spellings_are_normalized_equally(one: str, other: str) -> None:
    assert spelt(one) == spelt(other)


OTHERWISE_IN_MATH_VERIFY = {
    *(("6 3/4", r"\frac{27}{4}"), ("x=6 3/4", "27/4"), (r"1\,234", "1234"), ("5.", "5"), (r"50\%", "50")),
    *(("0.333333", r"\frac{1}{3}"), (r"5\text{ }6", "56")),
}
"""math-verify reads no mixed numbers without LaTeX, no thin spaces, no full stop, 50% as 1/2 alone. It rounds to six digits, and
drops text between digits."""


@pytest.mark.parametrize(("answer", "truth"), [*SAME, *DIFFERENT])
def test_math_verify_agrees(answer: str, truth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # it logs what it cannot parse
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
    agrees = math_verify.verify(*parsed, timeout_seconds=None) == ((answer, truth) in SAME)
    assert agrees != ((answer, truth) in OTHERWISE_IN_MATH_VERIFY)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 99), st.integers(1, 9), st.integers(2, 9), st.sampled_from([" ", r"\ ", r"\;", "~"]))
def test_mixed_number_equals_its_value_and_no_other_fraction(whole: int, top: int, bottom: int, space: str) -> None:
    mixed, value = f"{whole}{space}{top}/{bottom}", whole + Fraction(top, bottom)
    assert same(mixed, f"\\frac{{{value.numerator}}}{{{value.denominator}}}")
    glued = Fraction(int(f"{whole}{top}"), bottom)
    for truth in (f"{whole}{top}/{bottom}", f"\\frac{{{whole}{top}}}{{{bottom}}}"):
        assert same(mixed, truth) is same(truth, mixed) is (value == glued)


@settings(max_examples=150, deadline=None)
@given(st.from_regex(r"[0-9]{2,6}", fullmatch=True), st.data(), st.sampled_from([" ", r"\ ", r"\:", "~", r"\text{ }", "\n"]))
def test_digits_with_white_space_between_are_not_one_number(digits: str, data: st.DataObject, space: str) -> None:
    """Unless a plain space groups thousands."""
    at = data.draw(st.integers(1, len(digits) - 1))
    assume(not (space in (" ", "\n") and at <= 3 and len(digits) - at == 3))
    assert not same(digits[:at] + space + digits[at:], digits) and not same(digits, digits[:at] + space + digits[at:])


@settings(max_examples=10, deadline=None)
@given(st.sampled_from("abknxyz"), st.sampled_from("abknxyz"), st.integers(-99, 99))
def test_two_names_of_variables_are_one_or_the_answer_is_wrong(one: str, other: str, value: int) -> None:
    assert same(f"{one}={value}", f"{other} = {value}") is (one == other)
    assert same(f"{one} = {value}", f"{value}") and same(f"{value}", f"${one}={value}$")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.integers(0, 999))
def test_thousands_are_grouped_behind_a_first_digit_that_is_not_zero(first: int, rest: int) -> None:
    assert same(f"{first},{rest:03}", f"{first * 1000 + rest}") is (first > 0 or rest == 0)
    assert not same(f"0{first},{rest:03}", f"{first * 1000 + rest}") or first == rest == 0


ADVERSARIAL = {
    "tower": "\\boxed{9**9**9**9}",
    "latex tower": "\\boxed{9^{9^{9^{9}}}}",
    "lower tower": "\\boxed{9^{9^9}}",
    "nested powers": "\\boxed{(((9^9)^9)^9)^9}",
    "large powers": "\\boxed{x^{999}-y^{998}+(x+y)^{997}}",
    "factorial": "\\boxed{999!^{999}}",
    "open braces": "{" * 3_000_000,
    "boxes": "\\boxed{" * 300_000,
    "closed braces": "\\boxed{" + "{" * 1_000_000 + "}" * 1_000_000 + "}",
    "digits": "\\boxed{" + "9" * 100_000 + "}",
    "nested brackets": "\\boxed{" + "(" * 400 + ")" * 400 + "}",
    "nested fractions": "\\boxed{" + "\\frac{" * 19 + "1" + "}{2}" * 19 + "}",
    "nested roots": "\\boxed{" + "\\sqrt{" * 19 + "2" + "}" * 19 + "}",
    "spaces": "\\boxed{" + " " * 1_000_000 + "1}",
    "nul": "\\boxed{x\0}",
    "matrix": "\\boxed{\\begin{matrix}" + "1&" * 200 + "1\\end{matrix}}",
    "backslashes": "\\boxed{" + "\\" * 1900 + "}",
    "surrogate": "\\boxed{\ud800}",
    "python": "\\boxed{__import__('os')._exit(0)}",
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_responses_are_scored_within_the_limit(name: str) -> None:
    """They take at most 0.8 s of CPU time in the confined process; the bound leaves room for a busy machine."""
    fork_server("trainer.rewards.rules.math")  # it is there
    start = time.monotonic()
    assert score(ADVERSARIAL[name], "x+7") == 0.0
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(("answer", "truth", "alike"), [
    ("10 000", "10000", True), ("1 000 000", r"1{,}000{,}000", True), ("5 6", "56", False), ("10 00", "1000", False),
    ("1 0000", "10000", False),
])  # fmt: skip
def test_space_groups_thousands_only(answer: str, truth: str, alike: bool) -> None:
    assert same(answer, truth) == alike


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed 5$ more", "5"),
        (r"\boxed 5 more", "5"),
        (r"\boxed{1} then \boxed 2", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x>0\right\}}", r"\left\{x \mid x>0\right\}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),  # an escaped brace has no partner to wait for
        (r"\boxed{\}} }", r"\}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),  # the last one counts, and it stays open
        (r"\boxed", None),
        (r"\boxedx{1}", None),
        ("5", None),
        ("", None),
        (r"\boxed{" + "1" * 3000 + "}", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    boxed = last_boxed(text)
    assert (None if boxed is None else boxed.content) == content


def test_last_boxed_reports_its_position() -> None:
    boxed = last_boxed(r"12\boxed{5}")
    assert boxed is not None and boxed.start == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("1,234,567.25", "1234567.25"),
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("-3", "-3"),
        ("−3", "-3"),
        ("-$3", "-3"),
        ("$-3$", "-3"),
        ("+3", "3"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("5.", "5"),
        ("1/2", "1/2"),
        ("1 / -2", "-1/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\dfrac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"\tfrac12", "1/2"),
        (r"\frac1{12}", "1/12"),
        ("2 1/2", "5/2"),
        ("-2 1/2", "-5/2"),
        (r"2\frac{1}{2}", "5/2"),
        ("1.5e3", "1500"),
        (r"2 \times 10^{-3}", "1/500"),
        ("2*10^3", "2000"),
        (r"90^\circ", "90"),
        (r"10\text{ cm}^2", "10"),
        ("**18**", "18"),
    ],
)
def test_number_has_its_value(text: str, number: str) -> None:
    value = value_of(text)
    assert value is not None and value.number == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2x",
        "1,2",
        "(1,2)",
        "3 4",
        "1/0",
        r"\frac{1}{0}",
        "9" * 101,
        "1e101",
        "2^3",
        r"\sqrt{4}",
        "1\0",
        "0,500",
        "1-1/2",
    ],
)
def test_text_that_is_not_one_number_has_no_value(text: str) -> None:
    assert value_of(text) is None


def test_minus_is_a_sign_only_at_the_start() -> None:
    assert [value.number for value in values("10-5 = 5, x=-3, (-2), 7 -4")] == [10, 5, 5, -3, -2, 7, -4]


def test_number_in_a_sentence_may_be_hyphenated_and_starts_no_group_at_zero() -> None:
    assert [value.number for value in values("0,500 and 1,000,500 of 1-1/2")] == [1000500, Fraction(3, 2)]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("50%", "50", True), ("50%", "0.5", True), ("50%", "50%", True), ("50%", "0.5%", False), ("50", "0.5", False)],
)
def test_percent_sign_is_compared(one: str, other: str, equal: bool) -> None:
    a, b = value_of(one), value_of(other)
    assert a is not None and b is not None
    assert a.equals(b) is equal and b.equals(a) is equal


@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
def test_every_spelling_of_a_fraction_is_its_value(top: int, bottom: int) -> None:
    wanted, sign = Fraction(top, bottom), "-" if top < 0 else ""
    whole, rest = divmod(abs(top), bottom)
    texts = [
        f"{top}/{bottom}",
        f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}",
        f"\\dfrac{{{top}}}{{{bottom}}}",
        f"{sign}{whole} {rest}/{bottom}",
    ]
    for text in [*texts, f"{sign}{abs(top):,}/{bottom}", f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}"]:
        value = value_of(text)
        assert value is not None and value.number == wanted, text


@pytest.mark.parametrize(
    "expression",
    [
        "9^9^9^9",
        "9^{9^{9^9}}",
        "9**9**9**9",
        "(((9^9)^9)^9)",
        "e^{e^{e^x}}",
        "2^{10000}",
        "2^(99999)",
        "5000!",
        "3!!",
        "9" * 40,
        "{" * 21 + "}" * 21,
        "(" * 21 + ")" * 21,
        "x\0",
        "+".join(f"x^{n}" for n in range(13)),
        "a" * 501,
    ],
)
def test_costly_expressions_are_not_evaluated(expression: str) -> None:
    assert not is_cheap(expression)


@pytest.mark.parametrize(
    "expression", [r"x^{100}", "2^{999}", r"\frac{\sqrt{x^2+y^2}}{(a+b)^2}", "x^4+x^3+x^2+x+1", "a^2b^2c^2d^2", "10!", "9" * 39]
)
def test_common_answers_are_evaluated(expression: str) -> None:
    assert is_cheap(expression)


def test_comparison_over_its_limits_is_false_and_the_next_one_works() -> None:
    endless = r"x^{999}-y^{998}+(x+y)^{997}"
    assert is_cheap(endless) and LIMITS.cpu_seconds < 1.0
    assert not equivalent(endless, "5")
    assert equivalent("y+1", "1+y")


def test_comparisons_work_in_any_thread_and_set_no_alarm() -> None:
    found: list[bool] = []
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    thread = threading.Thread(target=lambda: found.append(equivalent("2(x+1)", "2x+2")))
    thread.start()
    thread.join()
    assert found == [True] and equivalent("2(y+1)", "2y+2")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
