"""Groups with and without a learning signal."""

import pytest
import torch

from configs.schema.ppo import FilterGroupsConfig
from trainer.rollout.group_filtering import Tally, group_verdicts, metric_values
from workers.batch import Batch


@pytest.mark.parametrize(
    ("values", "n", "verdict"),
    [
        ([0.0, 1.0, 0.0], 3, "kept"),
        ([1.0, 1.0 + 2**-52, 1.0], 3, "kept"),
        ([0.0, 0.0, 0.0], 3, "low"),
        ([-1.0, -1.0, -1.0], 3, "low"),
        ([1.0, 1.0, 1.0], 3, "high"),
        ([0.1, 0.1, 0.1], 3, "high"),  # its floating-point standard deviation is not 0
        ([0.0, 1.0], 3, "kept"),  # a reward failed
        ([1.0, 1.0], 3, "high"),
        ([1.0], 3, "failed"),
        ([], 3, "failed"),
        ([0.0], 1, "kept"),
        ([], 1, "failed"),
    ],
)
def test_group_is_kept_if_its_scores_differ(values: list[float], n: int, verdict: str) -> None:
    assert group_verdicts([5], [5] * len(values), values, n) == {5: verdict}


def test_statuses_have_the_order_of_the_prompts() -> None:
    verdicts = group_verdicts([9, 4, 7], [4, 9, 4, 9], [0.0, 1.0, 1.0, 1.0], 2)
    assert list(verdicts.items()) == [(9, "high"), (4, "kept"), (7, "failed")]


def batch(extras: list[dict[str, float]]) -> Batch:
    n = len(extras)
    return Batch(
        torch.ones(n, dtype=torch.int64),
        rows={"score": torch.arange(n) / 2, "reward": -torch.ones(n)},
        objects={"reward_extra": extras, "data_source": ["math"] * n},
    )


def test_filter_metric_is_found_by_name() -> None:
    output = batch([{"acc": 1.0, "format": 0.25}, {"acc": 0.0, "format": 0.5}])
    assert metric_values(output, None) == metric_values(output, "score") == [0.0, 0.5]
    for name in ("reward", "seq_reward", "seq_final_reward"):
        assert metric_values(output, name) == [-1.0, -1.0]
    assert metric_values(output, "acc") == [1.0, 0.0] and metric_values(output, "format") == [0.25, 0.5]
    assert metric_values(batch([{"acc": 1.0}, {}]), "acc") == [1.0, 0.5], "the score, where the function reports no acc"
    with pytest.raises(ValueError, match=r"metric=format: .* for data source math; known: acc, score, seq_reward$"):
        metric_values(batch([{"format": 1.0}, {}]), "format")


def test_only_consecutive_rounds_count_as_a_pass_without_a_group() -> None:
    tally = Tally(FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=0), wanted=3, rounds_per_epoch=2)
    for verdict in ("low", "kept", "high", "kept", "low"):
        tally.check_another(1)
        tally.add([verdict], [0.0])  # type: ignore[list-item]
    tally.check_another(1)
    tally.add(["low"], [0.0])
    with pytest.raises(ValueError, match=r"a whole pass over the data, kept none: of 6 groups 3 .*every answer acc <= 0"):
        tally.check_another(1)
