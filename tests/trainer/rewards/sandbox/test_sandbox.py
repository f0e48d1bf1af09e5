"""Ordinary programs and the assertions of known data sets keep working: each scores 1."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rewards.config import reward_config
from trainer.rewards.rules.code import score


def score_of(program: str, truth: Any) -> float:
    config = reward_config(code={"time_limit": 5.0, "memory_limit_mb": 1024}).code
    return score(program, truth, config, seconds=60.0)["score"]


def honest_programs() -> Iterator[tuple[str, Any]]:
    _, *parts = Path(__file__).with_name("honest_programs.txt").read_text().split("\n=== ")
    for part in parts:
        kind, _, text = part.partition("\n")
        program, *tests = text.split("\n---\n")
        if " -> " in kind:
            stdin, stdout = kind.split(" -> ")
            yield program, {"inputs": [stdin], "outputs": [stdout]}
        for test in tests:
            yield program, [test] if kind == "asserts" else {"test": test, "entry_point": kind.removeprefix("check of ")}


@pytest.mark.parametrize(("program", "truth"), [*honest_programs()])
def test_honest_programs_pass(program: str, truth: Any) -> None:
    assert score_of(program, truth) == 1.0


ANSWERS_BY_HAND = """
import json, os
from trainer.rewards.sandbox.proxies import Peer
def f(*args): return args[0]
def hack(peer, operation, subject, *more, answer=Peer._answer):
    if subject == ["yours", [0]]: return answer(peer, operation, subject, *more)
    os.write(5, json.dumps(MESSAGE).encode() + b"\\n")
Peer._answer = hack
"""


@pytest.mark.parametrize(
    ("program", "asserts"),
    [
        (
            ANSWERS_BY_HAND.replace("MESSAGE", '["return", ["list", []], ["list", []]]'),  # with the argument's state
            "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)",
        ),
        (
            ANSWERS_BY_HAND.replace("MESSAGE", '["return", ["yours", [["slice", [0, None, None]]]]]'),
            "g = lambda: 3\nassert f(g) == [g]",
        ),
        (
            "def f(node):\n    node.equals = lambda other: True\n    return node",
            "class N:\n    v = 1\n    def equals(self, o): return self.v == o.v\nb = N()\nb.v = 7\nassert f(N()).equals(b)",
        ),
        (
            "class L:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\ndef f(x): return L()",
            "r = f(3)\nassert len(r) == 3 and all(a == b for a, b in zip(r, [1, 2, 3]))",
        ),
        (
            "class S:\n    one = None\n    def __new__(cls):\n        S.one = S.one or object.__new__(cls)\n        return S.one",
            "assert S() is not S()",
        ),
        ("class P:\n    def __eq__(self, o): return True\ndef f(): return P()", "assert f() == P()"),
        ("class P:\n    def __eq__(self, o): return True\ndef f(): return P()", "assert f() != 3"),
        ("def f(x):\n    x.clear()\n    return []", "x = [3, 1]\nassert f(x) == sorted(x)"),
        ("def sorted(x): return [1]\ndef f(x): return x", "assert sorted(f([2, 1])) == [1]"),
        ("def isclose(*a): return True\ndef add(*a): return 0", "assert isclose(add(1, 2), 3)"),
        ("def isclose(*a): return True", "assert isclose(add(1, 2), 3)"),
        ("x = 1", "assert isclose(add(1, 2), 3)"),
        ("def add(*a): return 5\nsqrt = add", "assert add(1, 2) == sqrt(9)"),
        ("def add(*a): return 5\nsqrt = add", "assert (x := add(1, 2)) > 0 and x == sqrt(9)"),
        ("def add(*a): return 5\nsqrt = add", "x = add(1, 2)\nassert x == sqrt(9)"),
        ("def add(*a): return 5\nsqrt = add", "assert (add(1, 2) == 3) == (sqrt(9) == 3) and sqrt(9) == add(1, 2)"),
        ("x = 1", "assert sum(1, 2) == 3"),
        ("class np:\n    def allclose(*a): return True\ndef f(): return 3", "assert np.allclose(f(), 4)"),
        ("def other(): pass", "assert missing() is None"),
        ("import os\ndef f(): os._exit(0)", "try:\n    f()\nexcept Exception:\n    pass"),
    ],
)
def test_program_cannot_decide_its_own_score(program: str, asserts: str) -> None:
    assert score_of(program, [asserts]) == 0.0
