"""The answer is the ground truth, to the letter."""


def score(answer: str, ground_truth: str, *, finished: bool) -> float:
    """1 if the answer equals the ground truth and was ended by the model; one that ran into the length limit is not right."""
    return float(finished and answer == ground_truth)
