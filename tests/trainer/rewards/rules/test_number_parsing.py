from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.rules.number_parsing import value_of, values


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


def test_a_minus_is_a_sign_where_nothing_stands_before_it() -> None:
    assert [value.number for value in values("10-5 = 5, x=-3, (-2), 7 -4")] == [10, 5, 5, -3, -2, 7, -4]


def test_a_number_in_a_sentence_groups_no_thousands_from_a_zero_on_and_may_be_hyphenated() -> None:
    assert [value.number for value in values("0,500 and 1,000,500 of 1-1/2")] == [1000500, Fraction(3, 2)]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("50%", "50", True), ("50%", "0.5", True), ("50%", "50%", True), ("50%", "0.5%", False), ("50", "0.5", False)],
)
def test_per_cent(one: str, other: str, equal: bool) -> None:
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
