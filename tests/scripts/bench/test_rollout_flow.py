"""Partial rollouts on simulated engines: speed, occupancy, ages, and ordinals that are taken once. A tick of eight steps."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import trainer.rollout.remote_rollout as remote_rollout
from scripts.bench.rollout_flow import Mode, Settings, SimulatedEngine, Simulation, main
from workers.batch import Batch, counts_in
from workers.controller.group import WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.rollout.base import Sampling

SMALL = Settings(
    prompts=8, n=8, prompt_tokens=8, max_tokens=256, slots=32, replicas=1, oversubmit=1.5, max_age=4, a=5e-3, b=64e-6, c=16e-6,
    train=0.0, steps=8, warm_up=4,
)  # fmt: skip
"""A decode step with full slots, and prefill, cost as much of the total as with the defaults."""
SAMPLING = Sampling(1.0, -1, 1.0, max_tokens=SMALL.max_tokens, stop_token_ids=())


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 8)


@pytest.mark.parametrize("replicas", [1, 2])
def test_partial_rollouts_are_faster_and_keep_the_slots_full(replicas: int, capsys: pytest.CaptureFixture[str]) -> None:
    settings = asdict(replace(SMALL, replicas=replicas, prompts=SMALL.prompts * replicas))
    others = ("max_staleness", "decode")  # of ahead.py and partial_rollouts.py
    main([f"--{name}={value}" for name, value in settings.items() if name not in others])
    report = json.loads(capsys.readouterr().out)
    assert report["settings"] == settings | {"decode": []}
    partial = report["partial"]
    assert partial["ratio"] == report["synchronous"]["seconds_per_step"] / partial["seconds_per_step"] >= 1.4
    assert report["synchronous"]["running"] < 0.6 and 0.9 <= partial["running"] <= 1
    assert partial["oldest_unfinished"] < SMALL.max_age
    assert 0 < partial["age_mean"] < partial["age_max"] and 0 < partial["stale_tokens"] < 1 and partial["recomputed_tokens"] > 0


@pytest.mark.parametrize("max_age", [1, 2])
def test_ordinals_are_taken_once_and_unfinished_groups_have_less_than_the_maximum_age(max_age: int, tmp_path: Path) -> None:
    settings = replace(SMALL, max_age=max_age)
    taken: list[int] = []
    oldest: set[int] = set()
    with LocalBackend() as backend:
        run = Simulation(settings, backend, tmp_path, "partial")
        for _ in range(6):
            batch = run.step()
            uids, samples = batch.rows["uid"].tolist(), batch.rows["sample"].tolist()
            expected = [min(settings.response_length(*of), settings.max_tokens) for of in zip(uids, samples, strict=True)]
            lengths = counts_in(batch.tokens["response_mask"], batch.lengths)
            assert lengths.tolist() == expected, "interruptions do not change a response"
            taken += dict.fromkeys(uids)
            drawn = run.stream.drawn * settings.prompts + run.stream.taken
            assert sorted(taken + run.buffer.arrays()["ordinal"].tolist()) == list(range(drawn))
            oldest.add(run.oldest_unfinished())
    assert len(taken) == 6 * settings.prompts and max(oldest) == max_age - 1


def test_modes_sample_the_same_responses(tmp_path: Path) -> None:
    with LocalBackend() as backend:
        batch = Simulation(SMALL, backend, tmp_path, "one round").step()
    ordinals, samples = batch.rows["uid"].tolist(), batch.rows["sample"].tolist()
    assert (ordinals, samples) == ([i for i in range(8) for _ in range(8)], list(range(8)) * 8)
    expected = [min(SMALL.response_length(*of), SMALL.max_tokens) for of in zip(ordinals, samples, strict=True)]
    assert counts_in(batch.tokens["response_mask"], batch.lengths).tolist() == expected
    assert batch.rows["finished"].tolist() == [
        int(SMALL.response_length(*of) <= 256) for of in zip(ordinals, samples, strict=True)
    ]


def test_lengths_are_geometric_with_a_mean_of_an_eighth() -> None:
    lengths = torch.tensor([SMALL.response_length(ordinal, sample) for ordinal in range(2000) for sample in range(8)])
    assert lengths.min() == 1 and lengths.double().mean().item() == pytest.approx(32, rel=0.03)
    assert (lengths > 32).double().mean().item() == pytest.approx((1 - 1 / 32) ** 32, rel=0.03)


def requests(ids: list[int], begun: list[int]) -> Batch:
    """Requests of 8 prompt tokens that begin with the ordinal."""
    tokens = [torch.full((8 + tail,), id // SMALL.n) for id, tail in zip(ids, begun, strict=True)]
    rows = {"id": torch.tensor(ids, dtype=torch.int64), "begun": torch.tensor(begun, dtype=torch.int64)}
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
    return Batch(lengths, {"input_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *tokens])}, rows)


def test_time_of_the_engine_equals_a_simulation_step_by_step() -> None:
    engine = SimulatedEngine(WorkerInfo(0, 1, 0, 0, "", 0), SMALL)
    ids = list(range(48))
    left = {id: min(SMALL.response_length(id // 8, id % 8), SMALL.max_tokens) for id in ids}
    waiting, running, ordinals = list(ids), list[int](), set[int]()
    batch = requests(ids, [0] * len(ids))
    for tick in range(3):
        found = engine.advance(batch if tick == 0 else requests([], []), SAMPLING, 20)
        ended, seconds = list[int](), 0.0
        for _ in range(20):
            while waiting and len(running) < SMALL.slots:
                running.append(waiting.pop(0))
                seconds += 0.0 if running[-1] // 8 in ordinals else SMALL.c * 8
                ordinals.add(running[-1] // 8)
            seconds += SMALL.a + SMALL.b * len(running)
            for id in running:
                left[id] -= 1
            ended += [id for id in running if not left[id]]
            running = [id for id in running if left[id]]
        assert sorted(found.rows["id"].tolist()) == sorted(ended) and found.meta["seconds"] == pytest.approx(seconds)
    sampled = engine.suspend()
    begun = dict(zip(sampled.rows["id"].tolist(), sampled.lengths.tolist(), strict=True))
    lengths = {id: min(SMALL.response_length(id // 8, id % 8), SMALL.max_tokens) for id in begun}
    assert begun == {id: lengths[id] - left[id] for id in (*running, *waiting)}
    engine.sync_weights(1)
    again = engine.advance(requests(list(begun), list(begun.values())), SAMPLING, 1)
    first = list(begun)[: SMALL.slots]
    prefill = SMALL.c * (sum(begun[id] for id in first) + 8 * len({id // 8 for id in first}))
    assert again.meta["seconds"] == pytest.approx(prefill + SMALL.a + SMALL.b * len(first))


def test_responses_that_end_in_the_first_tick_are_never_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No group beyond the batch is admitted before the second tick."""
    monkeypatch.setattr(remote_rollout, "STEPS", SMALL.max_tokens)
    settings = replace(SMALL, slots=256)
    with LocalBackend() as backend:
        run = Simulation(settings, backend, tmp_path, "partial")
        metrics = [run.step().meta["metrics"] for _ in range(6)]
    for name in ("rollout/waiting_groups", "rollout/unfinished_groups", "rollout/age/max", "rollout/stale_tokens"):
        assert [step[name] for step in metrics] == [0.0] * 6


def test_dynamic_sampling_with_partial_rollouts_keeps_the_slots_full(tmp_path: Path) -> None:
    """Half of the groups are dropped. Compared with rounds that begin early."""
    modes: tuple[Mode, ...] = ("rounds", "partial, filtered")
    seconds, running = list[float](), list[float]()
    for mode in modes:
        with LocalBackend() as backend:
            run = Simulation(SMALL, backend, tmp_path, mode)
            for _ in range(6):
                metrics = run.step().meta["metrics"]
        seconds.append(run.clock.seconds)
        running.append(run.clock.sequence_seconds / run.clock.seconds / SMALL.slots)
    assert seconds[1] < 0.75 * seconds[0] and running[0] < 0.9 < running[1]
    assert metrics["rollout/age/max"] <= SMALL.max_age
