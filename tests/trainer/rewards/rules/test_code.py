import json
import time
from typing import Any

import pytest

from tests.trainer.rewards.config import reward_config
from trainer.rewards.rules.code import extract, same_output, score

SUM = "a, b = map(int, input().split())\nprint(a + b)"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "[7]"], "fn_name": "add"}
ADD = "def add(a, b):\n    return a + b"


def score_of(answer: str, tests: Any, *, seconds: float = 30.0, **changes: Any) -> float:
    config = reward_config(code={"time_limit": 0.5, "memory_limit_mb": 512} | changes).code
    return score(answer, tests, config, seconds=seconds)["score"]


@pytest.mark.parametrize(
    "program",
    [
        SUM,
        f"Let me see.\n```python\nprint(0)\n```\nNo:\n```python\n{SUM}\n```\nDone.",
        f"```py\n{SUM}\n```",
        f"```\n{SUM}\n```",
        f"```python\n{SUM}",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "for line in sys.stdin:\n    print(sum(map(int, line.split())))\n    sys.exit(0)",
        'def main():\n    print(reduce(operator.add, map(int, input().split())))\nif __name__ == "__main__":\n    main()',
    ],
)
def test_programs_that_read_and_print(program: str) -> None:
    assert score_of(program, STDIN) == score_of(program, json.dumps(STDIN)) == 1.0


@pytest.mark.parametrize(
    ("program", "fraction"),
    [
        ("print(3)", 0.5),
        ("print(0)", 0.0),
        ("print(3", 0.0),
        ("", 0.0),
        ("\0", 0.0),
        ("raise ValueError", 0.0),
        (f"{SUM}\nraise ValueError", 0.0),
    ],
)
def test_score_is_the_fraction_of_passed_tests_or_all_or_nothing(program: str, fraction: float) -> None:
    assert score_of(program, STDIN) == fraction
    assert score_of(program, STDIN, partial=False) == 0.0


def test_acc_says_whether_all_pass() -> None:
    config = reward_config().code
    assert score(SUM, STDIN, config, seconds=30.0) == {"score": 1.0, "acc": 1.0}
    assert score("print(3)", STDIN, config, seconds=30.0) == {"score": 0.5, "acc": 0.0}


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        f"class Solution:\n    {ADD.replace('(a', '(self, a').replace(chr(10), chr(10) + '    ')}",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass N:\n    value: int\n"
        "def add(a, b): return N(a + b).value",
        "class Base:\n    def add(self, a, b): return a + b\nclass Solution(Base): pass",
        "def add(a: List[int], b: Optional[int]) -> int:\n    print('noise')\n    return a + b",
    ],
)
def test_functions_that_are_called(program: str) -> None:
    assert score_of(program, CALLS) == 1.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [("np.int64(7)", 7), ("np.arange(6).reshape(2, 3)", [[0, 1, 2], [3, 4, 5]]), ("[np.bool_(True), np.int32(2)]", [True, 2])],
)
def test_values_of_numpy_are_those_of_python(returned: str, expected: Any) -> None:
    tests = {"inputs": ["1"], "outputs": [expected], "fn_name": "f"}
    assert score_of(f"import numpy as np\ndef f(n):\n    return {returned}", tests) == 1.0


def test_return_value_is_compared_as_json() -> None:
    tests = {"inputs": ["[3, 1]"], "outputs": ["[[1, 3]]"], "fn_name": "f"}
    assert score_of("def f(x): return tuple(sorted(x))", tests) == 1.0
    assert score_of("def f(x): return {3, 1}", tests) == 1.0
    assert score_of("def f(x): return x", tests) == 0.0
    assert score_of("def f(x): return x", {"inputs": [[{"1": 2}]], "outputs": [{"1": 2}], "fn_name": "f"}) == 1.0


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ("0", "[0, 1]", False),  # verl takes the first element of any list
        ("0", "[0]", True),
        ("[0]", "[[0]]", True),
        ("True", "1", False),
        ("1", "true", False),
        ("[[True]]", "[[1]]", False),
        ("{'a': 1}", '{"a": true}', False),
        ("True", "true", True),
        ("True", "[true]", True),
        ("1.0", "1", True),
        ("{'a': [1.0]}", '{"a": [1]}', True),
        ("{'a': 1, 'b': 2}", '{"a": 1}', False),
        ("None", "null", True),
    ],
)
def test_return_value_has_the_expected_value(returned: str, expected: str, same: bool) -> None:
    tests = {"inputs": ["0"], "outputs": [expected], "fn_name": "f"}
    assert score_of(f"def f(x): return {returned}", tests) == float(same)


@pytest.mark.parametrize(
    "program",
    [
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "import os\ndef add(a, b): os._exit(0)",
        "def add(a, b): return 10 ** 10000",
        "import os\ndef add(a, b):\n    os.write(3, b'[' * 100_000)\n    os._exit(0)",
        "def add(a, b): return add",
        "def other(a, b): return a + b",
    ],
)
def test_function_cannot_declare_itself_correct(program: str) -> None:
    assert score_of(program, CALLS) == 0.0


ASSERTS = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]


@pytest.mark.parametrize("tests", [ASSERTS, {"assert_case": ASSERTS}, json.dumps(ASSERTS)])
def test_passing_assertions_score_one(tests: Any) -> None:
    assert score_of(ADD, tests) == 0.5
    assert score_of("import os\nos._exit(0)", tests) == score_of("raise SystemExit(0)", tests) == 0.0


def test_failed_assertion_does_not_end_the_run() -> None:
    assert {score_of(ADD, ["assert add(1, 2) == 4", *ASSERTS]) for _ in range(8)} == {1 / 3}


def test_humaneval() -> None:
    tests = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
    assert score_of(ADD, tests) == 1.0
    assert score_of("def add(a, b): return 4", tests) == 0.0


def test_test_over_its_time_limit_ends_the_run() -> None:
    """The first test is late; the nine others are not tried."""
    start = time.monotonic()
    assert score_of("while True: pass", {"inputs": ["x"] * 10, "outputs": ["x"] * 10}) == 0.0
    assert time.monotonic() - start < 4.0  # 0.5 s of CPU time


def test_tests_without_enough_time_are_not_started() -> None:
    tests = {"inputs": ["x"] * 20, "outputs": ["x"] * 20}
    slow = "import time\ntime.sleep(0.3)\nprint('x')"
    assert score_of(slow, tests, seconds=3.6) in [n / 20 for n in range(1, 4)]  # a test may take 2 s, and 1 s is kept


def test_the_expected_output_may_be_long() -> None:
    tests = {"inputs": [""], "outputs": ["x" * (3 << 20)]}
    assert score_of(f"print('x' * {3 << 20})", tests) == 1.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (f"print('€' * {1 << 19})", {"inputs": [""], "outputs": ["€" * (1 << 19)]}),
        ("def f(n): return list(range(n))", {"inputs": ["200000"], "outputs": [list(range(200_000))], "fn_name": "f"}),
    ],
    ids=["bytes", "value"],
)
def test_the_limit_of_the_output_is_twice_the_expected_bytes(program: str, tests: Any) -> None:
    assert score_of(program, tests) == 1.0


@pytest.mark.parametrize(
    "tests", [{"inputs": [], "outputs": []}, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, "no JSON", []]
)
def test_a_ground_truth_without_tests_is_an_error(tests: Any) -> None:
    with pytest.raises(ValueError):
        score_of(SUM, tests)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1\n2 3", "1 2\n3", True),
        ("0.3333333", "0.3333334", True),
        ("1.0", "1", True),
        ("2.9999999999999996", "3", True),
        ("1000000000.0", "1000000007", False),
        ("1e9", "1000000000", True),
        ("inf", "7" * 400, False),
        ("inf", "7" * 400 + ".5", False),
        ("1e400", "1e500", False),
        ("-inf", "inf", False),
        ("7" * 400 + ".0", "7" * 400, True),
        ("nan", "1", False),
        ("sNaN", "1", False),
        ("1e999999999", "1", False),
        ("x", "\u00b2", False),
        ("10000000", "10000001", False),
        ("a b", "b a", False),
        ("1 2", "1 2 3", False),
        ("nan", "nan", True),
        ("yes", "Yes", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


def test_the_last_block_is_the_program() -> None:
    assert extract("```python\n1\n```\n```python\n2\n```\n```text\n3\n```") == "2\n"
    assert extract("```\n1\n```") == "1\n"
    assert extract("1") == "1"
    start = time.monotonic()
    extract("```python" * 200_000)
    extract("```python\n" * 200_000)
    extract("```\n" * 200_000)
    assert time.monotonic() - start < 1.0
