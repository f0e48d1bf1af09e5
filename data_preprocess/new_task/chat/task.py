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


def reply(spoken: list[str], known: str) -> tuple[str, float, bool]:
    """What the other side writes after the turns ``spoken`` of the model; the score of the last turn; whether this is the end.

    Here it names a digit at a time, and the model has to say the last digit of their sum. The scores of a conversation are added.
    Random choices must come from ``known``: a resumed run repeats them.
    """
    right = spoken[-1].strip() == str(sum(map(int, known[: len(spoken)])) % 10)
    is_over = len(spoken) == len(known)
    return ("" if is_over else known[len(spoken)]), right / len(known), is_over


def example(random: Random, spoken: list[str], known: str) -> str:
    """A turn for the warm start: what the model could say next. It need not be good, but the model learns from nothing else."""
    return str(sum(map(int, known[: len(spoken) + 1])) % 10)


class Conversation(Environment):
    """What training calls."""

    pure = True

    def reset(self, task: Any) -> Turns:
        self.known: str = task.ground_truth
        self.spoken: list[str] = []
        return list(task.prompt)

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        self.spoken.append(message["content"] or "")
        return *reply(self.spoken, self.known), {}


def conversation(random: Random, prompt: str, known: str) -> Turns:
    """A whole worked example."""
    turns: Turns = []
    spoken: list[str] = []
    is_over = False
    while not is_over:
        spoken.append(example(random, spoken, known))
        text, _, is_over = reply(spoken, known)
        turns.append({"role": "assistant", "content": spoken[-1]})
        if not is_over:
            turns.append({"role": "user", "content": text})
    return turns


if __name__ == "__main__":
    write_task(make_problem, name=Path(__file__).resolve().parent.name, example=conversation)
