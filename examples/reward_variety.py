"""Custom reward over a whole batch: diversity of the responses to a prompt. Used by docs/how_to/reward.md."""

from collections import Counter
from typing import Any


def compute_score(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[float]:
    """1 for a response that occurs once among those to its prompt, 1/2 if it occurs twice, and so on."""
    responses = [(info["index"], text) for info, text in zip(extra_infos, solution_strs, strict=True)]
    count = Counter(responses)
    return [1 / count[response] for response in responses]
