"""Extract the final answer of a response as a vote for maj@k."""

from collections.abc import Callable

from trainer.rewards.rules.gsm8k import extract
from trainer.rewards.rules.math import last_boxed
from trainer.run.user_code import load_function

Vote = Callable[[str], str | None]
"""Maps a response to its vote; None: no vote."""


def _text(answer: str) -> str | None:
    return answer.strip() or None


def _boxed(answer: str) -> str | None:
    boxed = last_boxed(answer)
    return boxed.content.strip() if boxed is not None else None


def _gsm8k(answer: str) -> str | None:
    return extract(answer, "flexible")


VOTES: dict[str, Vote] = {"text": _text, "boxed": _boxed, "gsm8k": _gsm8k}
"""Values of ``metrics.vote``: the whole text, the content of the last boxed expression, the number of a GSM8K answer."""


def vote_function(name: str) -> Vote:
    """Vote function of a name or of FILE.py:FUNCTION. Raises ValueError if unknown or not loadable."""
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return load_function(path, function, f"metrics.vote={name}")
    if name not in VOTES:
        raise ValueError(f"metrics.vote={name} is not known; known: {', '.join(VOTES)}, or FILE.py:FUNCTION of your own")
    return VOTES[name]
