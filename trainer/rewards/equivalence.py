"""Do two mathematical expressions mean the same? math-verify and SymPy say, confined: a model's text may never let them end."""

import json
import logging
import re
from functools import lru_cache

from trainer.rewards.forkserver import Limits, fork_server, serve

LIMITS = Limits(cpu_seconds=0.8, memory_bytes=4 << 30, output_bytes=1 << 10)
MAX_LENGTH = 500  # characters of an expression; the longest answer of MATH has 159
_MAX_DEPTH = 20
_POWER = re.compile(r"\^|\*\*")
_COSTLY = [
    re.compile(r"[0-9]{40}"),
    re.compile(r"(?:\^|\*\*)[\s{(]*-?[0-9]{4}"),
    re.compile(r"(?:(?:\^|\*\*)[\s{(]*-?(?:[0-9]+|[a-zA-Z])[\s)}]*){3}"),  # 9^9^9^9, bracketed in any way
    re.compile(r"!\s*!|[0-9]{4}\s*!"),
]
_MAX_POWERS = 12


@lru_cache(maxsize=4096)  # answers to one prompt are often the same
def equivalent(answer: str, ground_truth: str) -> bool:
    """False also where the comparison does not end within ``LIMITS``. Raises RuntimeError where nothing can be confined."""
    if not (is_tame(answer) and is_tame(ground_truth)):
        return False
    outcome = fork_server("trainer.rewards.equivalence").run([answer, ground_truth], LIMITS)
    return outcome.ending is None and outcome.result == "true"


def is_tame(expression: str) -> bool:
    """No tower of powers, no number of 40 digits, no deep nesting: what is nobody's answer and costs time is not tried."""
    if len(expression) > MAX_LENGTH or "\0" in expression:
        return False
    if any(pattern.search(expression) for pattern in _COSTLY) or len(_POWER.findall(expression)) > _MAX_POWERS:
        return False
    depth = 0
    for letter in expression:
        depth += (letter in "{([") - (letter in "})]")
        if depth > _MAX_DEPTH:
            return False
    return True


def main(fd: int) -> None:
    """In the server: import, and run once through what most answers need, so that each child starts with it."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # math-verify logs what it cannot parse

    def compare(job: list[str]) -> str:
        # Its own time-outs are alarms of the main thread; the child's limits stand in for them.
        theirs, ours = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in job)
        return json.dumps(bool(verify(ours, theirs, timeout_seconds=None)))

    for pair in (["\\frac{1}{2}", "0.5"], ["x^2+1", "1+x^2"], ["(1,2]", "\\left(1,2\\right]"], ["\\sqrt{8}", "2\\sqrt{2}"]):
        compare(pair)
    serve(fd, compare, opens=True)  # SymPy imports parts of itself when it needs them
