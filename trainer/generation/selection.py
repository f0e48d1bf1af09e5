"""Which of a prompt's scored answers are kept: the best one, or those that a model may learn from."""

from __future__ import annotations

from itertools import combinations

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
    enough = [text for text, score in ended(row).items() if min_score is None or score >= min_score]
    return [{"prompt": row["prompt"], "response": text} for text in enough[:most]]


def pairs(row: Row, most: int) -> list[Row]:
    """At most ``most`` rows for trainer.main_reward_model, prompt, chosen and rejected: answers that ended by themselves, each
    text once, the chosen one with the higher score. The best is set beside each worse one first, then the next best.
    """
    scores = ended(row)
    found = [(better, worse) for better, worse in combinations(scores, 2) if scores[better] > scores[worse]]
    return [{"prompt": row["prompt"], "chosen": better, "rejected": worse} for better, worse in found[:most]]


def ended(row: Row) -> dict[str, float]:
    """{text: score} of the answers that have a score and ended by themselves, the best first."""
    scores: dict[str, float] = {}
    for i in by_score(row):
        if row["finish_reasons"][i] == "stop":
            scores.setdefault(row["responses"][i], row["scores"][i])
    return scores


def by_score(row: Row) -> list[int]:
    """The answers that have a score, the best first, of like ones the earlier."""
    scores = row["scores"]
    return sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
