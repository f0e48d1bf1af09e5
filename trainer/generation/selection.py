"""Which of a prompt's scored answers are kept: the best one, or those that a model may learn from."""

from __future__ import annotations

from trainer.generation.shards import Row

LISTS = ("responses", "log_probs", "lengths", "finish_reasons", "scores", "reward_errors", "score_parts")


def best_of_n(row: Row) -> Row | None:
    """The row with its best answer alone: the highest score, of several the first. None if every reward failed."""
    ranked = by_score(row)
    return None if not ranked else row | {name: [row[name][ranked[0]]] for name in LISTS if name in row}


def accepted(row: Row, min_score: float | None, most: int) -> list[Row]:
    """At most ``most`` rows for supervised training, prompt and response: rejection sampling (Yuan et al. 2023,
    arXiv:2308.01825: the right answers that differ).

    Answers that ended by themselves with at least ``min_score`` (None: any), the best first, each text once. One that was cut at
    the length limit would teach the model to stop anywhere.
    """
    chosen: dict[str, Row] = {}
    for i in by_score(row):
        enough = min_score is None or row["scores"][i] >= min_score
        if enough and row["finish_reasons"][i] == "stop" and len(chosen) < most:
            text = row["responses"][i]
            chosen.setdefault(text, {"prompt": row["prompt"], "response": text})
    return list(chosen.values())


def by_score(row: Row) -> list[int]:
    """The answers that have a score, the best first, of like ones the earlier."""
    scores = row["scores"]
    return sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
