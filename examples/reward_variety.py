"""A reward of whole batches: how few answers to the same prompt say the same. docs/how_to/reward.md uses it."""

from collections import Counter
from typing import Any


def compute_score(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[float]:
    """1 for what no other answer to the prompt says, 1/2 for what two of them say, and so on."""
    said = [(info["index"], answer) for info, answer in zip(extra_infos, solution_strs, strict=True)]
    times = Counter(said)
    return [1 / times[each] for each in said]
