"""Exact match of response and ground truth."""


def score(answer: str, ground_truth: str, *, finished: bool) -> float:
    """1 if the response equals the ground truth and was ended by the model; 0 otherwise, also if it was truncated."""
    return float(finished and answer == ground_truth)
