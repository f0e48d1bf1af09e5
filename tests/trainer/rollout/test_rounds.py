"""Rounds of dynamic sampling that begin early, on simulated engines: the batches are those of rounds one after another."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import trainer.rollout.remote_rollout as remote_rollout
from scripts.bench.rollout_flow import Settings, Simulation
from trainer.data.order import DataOrder
from trainer.rollout.policies import FilteredRounds
from trainer.rollout.scheduler import Balance
from workers.batch import Batch
from workers.controller.local_backend import LocalBackend

SETTINGS = Settings(
    prompts=8, n=4, prompt_tokens=8, max_tokens=256, slots=16, replicas=1, oversubmit=1.5, max_age=4, a=5e-3, b=64e-6, c=16e-6,
    train=0.0, steps=8, warm_up=0, kept_share=0.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 8)


def sampled(
    settings: Settings, folder: Path, balance: Balance, *, epoch: int | None = None
) -> tuple[list[Batch], list[dict[str, int]], float]:
    """Batches, positions of the stream after them, and simulated seconds. epoch: prompts of the data; None: without end."""
    with LocalBackend() as backend:
        run = Simulation(settings, backend, folder, "rounds", balance=balance)
        if epoch is not None:
            run.stream = replace(run.stream, order=DataOrder(epoch, settings.prompts, seed=0, shuffle=False))
        batches, positions = [], []
        for _ in range(settings.steps):
            batches.append(run.step())
            positions.append(run.stream.state())
    return batches, positions, run.clock.seconds


@pytest.mark.parametrize(("replicas", "epoch"), [(1, None), (2, None), (1, 32)])
def test_batches_are_those_of_rounds_one_after_another(replicas: int, epoch: int | None, tmp_path: Path) -> None:
    """Also where a step begins a second pass over the data, in which it skips prompts that it kept in the first."""
    settings = replace(SETTINGS, replicas=replicas)
    batches, positions, seconds = sampled(settings, tmp_path, "tokens", epoch=epoch)
    expected, after, longer = sampled(settings, tmp_path, "static", epoch=epoch)
    assert positions == after, "prompts of rounds that were not needed return to the stream"
    wasted = [batch.meta["metrics"].pop("rollout/wasted_tokens") for batch in batches]
    if epoch is None:
        assert sum(wasted) > 0 and min(wasted) == 0, "some steps began a round that they did not need"
    else:
        drawn = [0, *(position["drawn"] for position in positions)]
        assert any(first // 4 < (end - 1) // 4 for first, end in pairwise(drawn)), "a step draws from two passes"
    assert not any(batch.meta["metrics"].pop("rollout/wasted_tokens") for batch in expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.meta == other.meta, "wasted tokens are counted nowhere else"
        assert batch.rows.keys() == other.rows.keys() and batch.tokens.keys() == other.tokens.keys()
        assert torch.equal(batch.lengths, other.lengths)
        assert all(torch.equal(column, other.rows[name]) for name, column in batch.rows.items())
        assert all(torch.equal(column, other.tokens[name]) for name, column in batch.tokens.items())
    assert seconds < 0.95 * longer


def test_state_after_a_step_determines_which_rounds_begin_early(tmp_path: Path) -> None:
    def steps(run: Simulation, count: int) -> list[float]:
        before = run.clock.seconds
        wasted = [run.step().meta["metrics"]["rollout/wasted_tokens"] for _ in range(count)]
        return [*wasted, round(run.clock.seconds - before, 6)]

    with LocalBackend() as backend:
        whole, resumed = (Simulation(SETTINGS, backend, tmp_path, "rounds") for _ in range(2))
        policies = whole.sampler.policy, resumed.sampler.policy
        assert isinstance(policies[0], FilteredRounds) and isinstance(policies[1], FilteredRounds)
        steps(whole, 3)
        resumed.n_steps = whole.n_steps
        resumed.stream.load(whole.stream.state())
        policies[1].load(policies[0].state())
        assert policies[0].kept_share < 1 and steps(whole, 3) == steps(resumed, 3)
        policies[1].load({})
        assert policies[1].kept_share == 1, "a checkpoint from before has none"


def test_no_round_begins_early_if_the_first_is_expected_to_fill_the_batch(tmp_path: Path) -> None:
    batches, _, seconds = sampled(replace(SETTINGS, kept_share=1.0, steps=3), tmp_path, "tokens")
    _, _, same = sampled(replace(SETTINGS, kept_share=1.0, steps=3), tmp_path, "static")
    assert all(batch.meta["metrics"]["training/filter_groups/rounds"] == 1 for batch in batches)
    assert not any(batch.meta["metrics"]["rollout/wasted_tokens"] for batch in batches)
    assert seconds == pytest.approx(same)
