"""The task, which a tool solves: edit the tool, make_problem, score and example. ``python task.py`` writes data/."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from data_preprocess.own_task import Turns, write_task
from trainer.agents.tools import tool


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)


def make_problem(random: Random) -> tuple[str, str]:
    """A prompt, and the answer to it. All random choices come from ``random``."""
    a, b = random.randrange(100, 1000), random.randrange(100, 1000)
    return f"{a}*{b}=", str(a * b)


def score(response: str, answer: str) -> float:
    """1 if the last number that the model wrote itself is the answer. ``response`` has its calls and their results, too."""
    numbers = re.findall(r"\d+", response.rpartition("</tool_response>")[2])
    return float(numbers[-1:] == [answer])


def example(random: Random, prompt: str, answer: str) -> Turns:
    """Turns for the warm start: a call, its result, and the answer."""
    a, b = map(int, re.findall(r"\d+", prompt))
    function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0", "content": multiply(a, b)},
        {"role": "assistant", "content": answer},
    ]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """What training calls. acc: the held-out accuracy counts complete successes only."""
    value = score(solution_str, ground_truth)
    return {"score": value, "acc": float(value >= 1.0)}


if __name__ == "__main__":
    write_task(make_problem, name=Path(__file__).resolve().parent.name, example=example, tools=[multiply.schema])
