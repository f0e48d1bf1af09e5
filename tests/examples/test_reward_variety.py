from examples.reward_variety import compute_score


def test_repeated_responses_score_less() -> None:
    infos = [{"index": index} for index in (0, 0, 0, 1)]
    assert compute_score(["sort_digits"] * 4, ["12", "12", "21", "12"], ["12"] * 4, infos) == [0.5, 0.5, 1.0, 1.0]
