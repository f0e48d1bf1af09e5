"""What an answer says, for counting votes."""

from collections.abc import Callable

from trainer.rewards.rules.boxed import last_boxed
from trainer.rewards.rules.gsm8k import extract
from trainer.run.user_code import load_function

Vote = Callable[[str], str | None]
"""The answer to what it says; None: nothing that could be counted."""


def _text(answer: str) -> str | None:
    return answer.strip() or None


def _boxed(answer: str) -> str | None:
    boxed = last_boxed(answer)
    return boxed.content.strip() if boxed is not None else None


def _gsm8k(answer: str) -> str | None:
    return extract(answer, "flexible")


VOTES: dict[str, Vote] = {"text": _text, "boxed": _boxed, "gsm8k": _gsm8k}
"""The names that ``metrics.vote`` takes."""


def vote_function(name: str) -> Vote:
    """Raises ValueError for a name that nobody knows, or a function that does not load."""
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return load_function(path, function, f"metrics.vote={name}")
    if name not in VOTES:
        raise ValueError(f"metrics.vote={name} is not known; known: {', '.join(VOTES)}, or FILE.py:FUNCTION of your own")
    return VOTES[name]
