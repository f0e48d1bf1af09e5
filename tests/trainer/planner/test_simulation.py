"""Simulated steps: the real scheduler, the same ends as engines that are called tick by tick, and speed."""

import time
from pathlib import Path

import numpy as np
import pytest

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from scripts.bench.rollout_flow import Settings, Simulation
from scripts.bench.shapes import SHAPES
from trainer.planner import simulation
from trainer.planner.hardware import GpuCluster, load_hardware
from trainer.planner.memory_model import Shape
from trainer.planner.search import RankedPlan
from trainer.planner.simulation import DecodeSlots, generate, sampled, simulate
from trainer.planner.step_time import EnginePlan
from trainer.planner.time_model import Communicator, Decoder, ResponseLengths
from workers.controller.local_backend import LocalBackend

ROLLOUT = "actor_rollout_ref.rollout"


class SimpleDecoder(Decoder):
    """A decode step takes a second for 16 sequences or fewer, and longer with more; prompts take nothing."""

    def step(self, running: float, context: float) -> float:
        return max(1.0, running / 16)

    def prefill(self, tokens: float, length: float) -> float:
        return 0.0


def engines(replicas: int, slots: int, call_steps: int = 0) -> EnginePlan:
    group = Communicator(1, False, load_hardware("h100"))
    return EnginePlan(SimpleDecoder(Shape.of(SHAPES["tiny"]), group, slots, 2, call_steps), replicas, 4, 2, slots, "tokens")


# With a mean of 32 tokens replicas get more than their slots as soon as the scheduler has seen how short responses are.
@pytest.mark.parametrize(("replicas", "slots", "longest"), [(1, 4, 2048), (2, 4, 2048), (3, 2, 2048), (4, 16, 2048), (3, 8, 256)])
def test_ticks_are_those_of_the_flow_with_called_engines(replicas: int, slots: int, longest: int, tmp_path: Path) -> None:
    # The trainer's own flow, whose engines are called once a tick.
    settings = Settings(
        prompts=12, n=4, prompt_tokens=8, max_tokens=longest, slots=slots, replicas=replicas, oversubmit=1.0, max_age=1,
        a=1.0, b=0.0, c=0.0, train=0.0, steps=1, warm_up=0,
    )  # fmt: skip
    with LocalBackend() as backend:
        run = Simulation(settings, backend, tmp_path, "one round")
        run.step()
    lengths = [min(settings.response_length(ordinal, sample), longest) for ordinal in range(12) for sample in range(4)]
    plan = engines(replicas, slots)
    found = generate(EnginePlan(plan.decoder, replicas, 12, 4, slots, "tokens"), 8, lengths, [])
    assert found == run.clock.seconds


def test_generation_waits_for_slots_and_ends_with_the_longest_response() -> None:
    trace: list[tuple[float, int]] = []
    # 8 responses of 10 tokens: two replicas with two slots each, twice.
    assert generate(engines(2, 2), 8, [10] * 8, trace) == 20.0
    assert trace[0] == (0.0, 4)
    assert generate(engines(1, 100), 8, [5, 70, 5, 5, 5, 5, 5, 5], []) == 70.0


def test_engine_waits_between_its_calls() -> None:
    turn = load_hardware("h100").software.turn
    assert generate(engines(2, 16, 32), 8, [70] * 4, []) == pytest.approx(70 + 3 * turn)


def test_replica_with_the_most_sequences_sets_the_time_of_a_tick() -> None:
    # 17 groups of two: 18 and 16 sequences.
    assert generate(engines(2, 32), 8, [32] * 34, []) == 32 * 18 / 16


def test_slots_start_waiting_requests_in_order() -> None:
    slots = DecodeSlots(2, 1)
    for request, tokens in ((7, 3), (8, 2)):
        slots.submit(0, request, tokens)
    assert slots.fill(0, 10) == [7] and slots.next_end == 13 and slots.running == [1, 0]
    assert slots.pop() == (13, 0, 7) and slots.fill(0, 13) == [8] and slots.next_end == 15
    assert slots.take() == {8: 15} and slots.next_end is None and slots.running == [0, 0]


@pytest.mark.parametrize("mean", [20, 300, 1000, 1024])
def test_sampled_lengths_have_the_given_mean_and_maximum(mean: int) -> None:
    found = sampled(ResponseLengths(100, mean, 1024), 20000, np.random.default_rng(0))
    assert sum(found) / 20000 == pytest.approx(mean, rel=0.02) and max(found) <= 1024 and min(found) >= 1


def test_thousand_gpus_are_simulated_within_a_tenth_of_a_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = GpuCluster.of("128x8xH100")
    words = [
        "algorithm=grpo", "rollout=vllm", "data.train_batch_size=1024", f"{ROLLOUT}.n=8", "data.max_response_length=4096",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024", "trainer.nnodes=128", "trainer.n_gpus_per_node=8",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ]  # fmt: skip
    shapes = dict.fromkeys(("actor_rollout_ref.actor", "actor_rollout_ref.ref"), Shape.of(SHAPES["7b"]))
    lengths = ResponseLengths(256, 1000, 4096)
    plan = RankedPlan(compose("ppo_trainer", PPOConfig, words), cluster, shapes, lengths, {})
    schedulers: list[simulation.RolloutScheduler] = []

    class Recorded(simulation.RolloutScheduler):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            schedulers.append(self)

    monkeypatch.setattr(simulation, "RolloutScheduler", Recorded)
    began = time.process_time()
    run = simulate(plan, 5)
    # Ten seconds for a hundred steps on one core.
    assert (time.process_time() - began) / 5 < 0.1
    assert len(schedulers) == 5 and all(one.unfinished == 0 and len(one.replicas) == 1024 for one in schedulers)
    assert run.running[0][1] == 8192
    # Sampled lengths, and the planner's quantiles.
    assert sum(run.steps) / 5 == pytest.approx(plan.seconds, rel=0.05)
