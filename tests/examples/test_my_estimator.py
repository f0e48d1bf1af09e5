from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.my_estimator import median_baseline
from tests.layout.source import ROOT
from tests.runs import make_task, run_ppo
from trainer.algorithms.advantages import AdvantageInputs


@given(st.lists(st.lists(st.integers(-8, 8), min_size=1, max_size=5), min_size=1, max_size=4))
def test_half_of_a_group_is_above_the_median(groups: list[list[int]]) -> None:
    scores = torch.tensor([float(score) for group in groups for score in group])
    inputs = AdvantageInputs(
        token_rewards=scores,
        response_mask=torch.ones(len(scores)),
        lengths=torch.ones(len(scores), dtype=torch.int64),  # answers of one token
        uid=torch.tensor([uid for uid, group in enumerate(groups) for _ in group]),
    )
    advantages = median_baseline(inputs, None).advantages.split([len(group) for group in groups])
    for group, found in zip(groups, advantages, strict=True):
        assert (found > 0).sum() <= len(group) / 2 and (found < 0).sum() <= len(group) / 2
        assert torch.equal(found - found[0], torch.tensor(group).float() - group[0])


def test_a_run_takes_it_from_the_file(tmp_path: Path) -> None:
    estimator = f"algorithm.adv_estimator={ROOT}/examples/my_estimator.py:median_baseline"
    steps = run_ppo(make_task(tmp_path), tmp_path / "run", estimator)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
