"""Reward of Search-R1 (Jin et al. 2025, arXiv:2503.09516): the answer in the last <answer> equals a golden one. Used by
scripts/run_qwen2.5-7b_grpo_search_vllm.sh."""

import re
import string
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any]) -> float:
    """ground_truth: ``{"target": [answers]}``. Compared without case, punctuation, articles and repeated white space."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return float(bool(found) and _normalised(found[-1]) in map(_normalised, ground_truth["target"]))


def _normalised(text: str) -> str:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
