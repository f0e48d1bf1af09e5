"""The calculator: arithmetic, and nothing else."""

from random import Random

import pytest

from tests.trainer.agents.tool_sessions import use
from trainer.agents.native.calculator import calculator, evaluate


def test_arithmetic_is_that_of_python() -> None:
    rng = Random(0)
    for _ in range(200):
        text = str(rng.randint(0, 20))
        for _ in range(rng.randint(1, 4)):
            text = (
                rng.choice([f"({text})", f"-({text})", text])
                + rng.choice([" + ", "-", "*", " / ", "//", "%"])
                + str(rng.randint(1, 30))
            )
        assert evaluate(text) == eval(text)
    assert (evaluate(" 2**10 "), evaluate("2**-1"), evaluate("1e3")) == (1024, 0.5, 1000.0)
    assert (evaluate("1**5000"), evaluate("(-1)**4097"), evaluate("2**3000")) == (1, -1, 2**3000)
    found, _ = use(calculator, {"expression": "123+456"})
    assert found[0].text == "579"


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9**999999",
        "2**4096",
        "(2**4000)*(2**4000)",
        "1/0",
        "1e308*10",
        "(-8)**0.5",
        "True",
        "x",
        "print(1)",
        "[1]",
        "'a'*9",
        "1 if 1 else 2",
        "().__class__",
        "",
        "1+",
        "1+" * 600 + "1",
        "(" * 400,
        "1e999",
        "2.0**9999",
    ],
)
def test_everything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        evaluate(text)
