"""The task, a conversation: edit make_problem, reply and example. ``python task.py`` writes data/."""

from pathlib import Path
from random import Random
from typing import Any

from data_preprocess.own_task import Turns, write_task
from trainer.agents.environments import Environment


def make_problem(random: Random) -> tuple[str, str]:
    """The first message, and what the other side knows. All random choices come from ``random``."""
    digits = "".join(random.choices("0123456789", k=4))
    return digits[0], digits


def reply(said: list[str], known: str) -> tuple[str, float, bool]:
    """What the other side writes after the turns ``said`` of the model; the score of the last turn; whether this is the end.

    Here it names a digit at a time, and the model has to say the last digit of their sum. The scores of a conversation are added.
    Random choices must come from ``known``: a resumed run repeats them.
    """
    right = said[-1].strip() == str(sum(map(int, known[: len(said)])) % 10)
    is_over = len(said) == len(known)
    return ("" if is_over else known[len(said)]), right / len(known), is_over


def example(random: Random, said: list[str], known: str) -> str:
    """A turn for the warm start: what the model could say next. It need not be good, but the model learns from nothing else."""
    return str(sum(map(int, known[: len(said) + 1])) % 10)


class Conversation(Environment):
    """What training calls."""

    pure = True

    def reset(self, task: Any) -> Turns:
        self.known: str = task.ground_truth
        self.said: list[str] = []
        return list(task.prompt)

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        self.said.append(message["content"] or "")
        return *reply(self.said, self.known), {}


def conversation(random: Random, prompt: str, known: str) -> Turns:
    """A whole worked example."""
    turns: Turns = []
    said: list[str] = []
    is_over = False
    while not is_over:
        said.append(example(random, said, known))
        text, _, is_over = reply(said, known)
        turns.append({"role": "assistant", "content": said[-1]})
        if not is_over:
            turns.append({"role": "user", "content": text})
    return turns


if __name__ == "__main__":
    write_task(make_problem, name=Path(__file__).resolve().parent.name, example=conversation)
