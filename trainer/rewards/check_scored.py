"""Scores outside of training: no penalty and no shaping."""

from collections.abc import Sequence

from trainer.rewards.scoring import Score


def check_some_scored(scores: Sequence[Score], of_what: str) -> None:
    """Raises ValueError, with the first error, if there is no score at all."""
    if scores and all(score.value is None for score in scores):
        raise ValueError(f"all {len(scores)} rewards of {of_what} failed; the first: {scores[0].error}")
