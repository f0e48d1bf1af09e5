import time

import pytest

from trainer.rewards.forkserver import fork_server
from trainer.rewards.math import score, spelt

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
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_what_means_the_same_is_right(answer: str, truth: str) -> None:
    assert score(f"so $\\boxed{{{answer}}}$.", truth) == 1.0
    assert score(f"so $\\boxed{{{truth}}}$.", answer) == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_what_does_not_is_wrong(answer: str, truth: str) -> None:
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
        ("k=7", "7"),
        (r"12\text{ miles}", "12"),
        (r"\textbf{(B)}", "(B)"),
        ("1,000", "1000"),
    ],
)
def test_one_spelling(one: str, other: str) -> None:
    assert spelt(one) == spelt(other)


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
def test_adversarial_answers_end_soon(name: str) -> None:
    """In CPU time they take 0.8 s at most, of the confined process; the bound leaves room for a busy machine."""
    fork_server("trainer.rewards.equivalence")  # it is there
    start = time.monotonic()
    assert score(ADVERSARIAL[name], "x+7") == 0.0
    assert time.monotonic() - start < 5.0
