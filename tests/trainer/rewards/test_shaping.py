"""The overlong penalty, clipping and normalisation of rewards."""

import json
import statistics

import pytest
import torch

from configs.schema.ppo import OverlongConfig, RewardKwargsConfig, ShapingConfig
from trainer.algorithms.moments import RunningMoments
from trainer.rewards.shaping import Shaping, group_moments, missing_eos_penalty, overlong_penalty

REWARDS = torch.tensor([0.0, 1.0, 3.0, -2.0, 0.5, 0.5, 7.0])
UIDS = torch.tensor([3, 3, 3, 3, 9, 9, 1])


def overlong(enable: bool = True, penalty_factor: float = 0.5) -> RewardKwargsConfig:
    buffer = OverlongConfig(enable=enable, len=4, penalty_factor=penalty_factor, log=False)
    return RewardKwargsConfig(max_resp_len=20, overlong_buffer_cfg=buffer)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16, 0.0), (17, -0.125), (18, -0.25), (19, -0.375), (20, -0.5), (21, -0.5), (1000, -0.5)],
)
def test_penalty_grows_only_in_the_buffer(length: int, penalty: float) -> None:
    """DAPO, eq. 13, with a limit of 20 and a buffer of 4 tokens."""
    assert overlong_penalty(torch.tensor([length]), overlong()).tolist() == [penalty]
    assert overlong_penalty(torch.tensor([length]), overlong(enable=False)).tolist() == [0.0]


def test_truncated_responses_get_the_missing_eos_penalty() -> None:
    finished = torch.tensor([1, 0, 1, 0])
    assert missing_eos_penalty(finished, 0.75).tolist() == [0.0, -0.75, 0.0, -0.75]
    assert missing_eos_penalty(finished, None).tolist() == [0.0] * 4


def shaping(clip: tuple[float, float] | None = None, normalize: str | None = None) -> Shaping:
    return Shaping(ShapingConfig(clip=clip, normalize=normalize), RunningMoments())  # type: ignore[arg-type]


def test_shaping_is_off_by_default() -> None:
    rewards, baselines = shaping()(REWARDS, UIDS, REWARDS + 1)
    assert torch.equal(rewards, REWARDS) and baselines is not None and torch.equal(baselines, REWARDS + 1)
    assert shaping()(REWARDS, UIDS)[1] is None


def test_rewards_are_clipped_before_they_are_normalised() -> None:
    clipped, baselines = shaping((-1.0, 2.0))(REWARDS, UIDS, REWARDS * 10)
    assert clipped.tolist() == [0.0, 1.0, 2.0, -1.0, 0.5, 0.5, 2.0]
    assert baselines is not None and baselines.tolist() == [0.0, 2.0, 2.0, -1.0, 2.0, 2.0, 2.0]
    assert torch.equal(shaping((-1.0, 2.0), "group")(REWARDS, UIDS)[0], shaping(None, "group")(clipped, UIDS)[0])


def test_group_normalisation() -> None:
    """Divided by the standard deviation of the group; equal rewards and a group of one become 0, and a value that is compared
    with them keeps its distance."""
    group = [0.0, 1.0, 3.0, -2.0]
    mean, std = statistics.fmean(group), statistics.pstdev(group)
    rewards, baselines = shaping(None, "group")(REWARDS, UIDS, torch.full((7,), 1.5))
    assert rewards.tolist() == pytest.approx([(value - mean) / std for value in group] + [0.0, 0.0, 0.0])
    assert baselines is not None and baselines.tolist() == pytest.approx([(1.5 - mean) / std] * 4 + [1.0, 1.0, -5.5])


def test_rounding_does_not_count_as_deviation() -> None:
    """Equal rewards whose mean is inexact give 0 instead of rounding noise divided by itself."""
    rewards = torch.tensor([0.1, 0.1, 0.1])
    for normalize in ("group", "running"):
        shaped, baselines = shaping(None, normalize)(rewards, torch.zeros(3), torch.tensor([1.1, 1.1, 1.1]))
        assert shaped.abs().max() < 1e-9 and baselines is not None and baselines.tolist() == pytest.approx([1.0] * 3)


def test_running_normalisation_counts_the_batch_itself_and_not_the_baselines() -> None:
    running = shaping(None, "running")
    first, _ = running(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]))
    assert first.tolist() == [-1.0, 1.0]
    second, baselines = running(torch.tensor([4.0, 6.0]), torch.tensor([1, 1]), torch.tensor([100.0, 3.0]))
    std = statistics.pstdev([0, 2, 4, 6])
    assert second.tolist() == pytest.approx([1 / std, 3 / std])
    assert baselines is not None and baselines.tolist() == pytest.approx([97 / std, 0.0])
    assert running.running.count == 4


def test_resumed_statistics_are_bitwise_identical() -> None:
    torch.manual_seed(0)
    whole, resumed = RunningMoments(), RunningMoments()
    batches = torch.randn(6, 5)
    for batch in batches[:3]:
        whole.update(batch)
    resumed.load(json.loads(json.dumps(whole.state())))
    for batch in batches[3:]:
        whole.update(batch)
        resumed.update(batch)
    assert resumed == whole


def test_moments_of_groups_by_rows() -> None:
    mean, std = group_moments(REWARDS, UIDS)
    for uid in (3, 9, 1):
        mine = REWARDS[uid == UIDS].tolist()
        assert mean[uid == UIDS].tolist() == pytest.approx([statistics.fmean(mine)] * len(mine))
        assert std[uid == UIDS].tolist() == pytest.approx([statistics.pstdev(mine) or 1.0] * len(mine))
