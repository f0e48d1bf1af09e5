"""Select scored responses of a prompt: best of n, rejection sampling for SFT, preference pairs."""

from __future__ import annotations

from itertools import combinations

from trainer.generation.shards import Row

LISTS = ("responses", "log_probs", "lengths", "finish_reasons", "scores", "reward_errors", "score_parts")


def best_of_n(row: Row) -> Row | None:
    """The row with only its highest-scoring response; ties go to the first. None if every reward failed."""
    ranked = by_score(row)
    return None if not ranked else row | {name: [row[name][ranked[0]]] for name in LISTS if name in row}


def accepted(row: Row, min_score: float | None, most: int) -> list[Row]:
    """Rejection sampling: at most ``most`` rows {prompt, response} for SFT (Yuan et al. 2023, arXiv:2308.01825).

    Takes distinct terminated responses with a score of at least ``min_score`` (None: any), best first. Truncated responses are
    excluded: they would teach the model to stop anywhere.
    """
    enough = [text for text, score in ended(row).items() if min_score is None or score >= min_score]
    return [{"prompt": row["prompt"], "response": text} for text in enough[:most]]


def pairs(row: Row, most: int) -> list[Row]:
    """Preference pairs: at most ``most`` rows {prompt, chosen, rejected} for trainer.main_reward_model.

    Both are distinct terminated responses, the chosen one with the higher score. The best response is paired with each worse one
    first, then the second best, and further on.
    """
    # Ordered best first, so the first of each combination never scores less than the second; ties are no preference.
    scores = ended(row)
    found = [(better, worse) for better, worse in combinations(scores, 2) if scores[better] > scores[worse]]
    return [{"prompt": row["prompt"], "chosen": better, "rejected": worse} for better, worse in found[:most]]


def ended(row: Row) -> dict[str, float]:
    """{text: score} of distinct terminated responses that have a score, best first."""
    scores: dict[str, float] = {}
    for i in by_score(row):
        if row["finish_reasons"][i] == "stop":
            scores.setdefault(row["responses"][i], row["scores"][i])
    return scores


def by_score(row: Row) -> list[int]:
    """Indices of the responses that have a score, best first; ties in order of generation."""
    scores = row["scores"]
    return sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
