"""Search: equal to brute force, never worse with more GPUs, and only plans that the command line accepts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from scripts.bench.shapes import SHAPES
from trainer.main_plan import composed
from trainer.planner import search
from trainer.planner.hardware import GpuCluster
from trainer.planner.memory_model import Shape
from trainer.planner.search import RankedPlan, alternatives, as_words, best_pairs, candidates, powers, ranked
from trainer.planner.time_model import ResponseLengths

ROLLOUT = "actor_rollout_ref.rollout"
LENGTHS = ResponseLengths(256, 600, 1024)


def words(cluster: GpuCluster, *more: str) -> list[str]:
    return [
        "algorithm=grpo", "rollout=vllm", "data.train_batch_size=64", f"{ROLLOUT}.n=8", "data.max_prompt_length=512",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", "data.max_response_length=1024", "data.train_files=[a.parquet]",
        "data.val_files=[a.parquet]", f"trainer.nnodes={cluster.nodes}", f"trainer.n_gpus_per_node={cluster.gpus}",
        f"{ROLLOUT}.tensor_model_parallel_size=1", *more,
    ]  # fmt: skip


def plan(cluster: str, model: str = "7b", *more: str) -> RankedPlan:
    of = GpuCluster.of(cluster)
    shape = Shape.of(SHAPES[model])
    shapes = {"actor_rollout_ref.actor": shape, "actor_rollout_ref.ref": shape}
    return RankedPlan(compose("ppo_trainer", PPOConfig, words(of, *more)), of, shapes, LENGTHS, {})


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.floats(0, 10), max_size=6),
    columns=st.lists(st.floats(0, 10), max_size=6),
    forbidden=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
    ahead=st.booleans(),
)
def test_pairs_are_those_of_brute_force_in_their_order(
    rows: list[float], columns: list[float], forbidden: set[tuple[int, int]], ahead: bool
) -> None:
    def cost(row: tuple[int, float], column: tuple[int, float]) -> float:
        return max(row[1], column[1]) if ahead else row[1] + column[1]

    def fits(row: tuple[int, float], column: tuple[int, float]) -> bool:
        return (row[0], column[0]) not in forbidden

    first, second = [*enumerate(rows)], sorted(enumerate(columns), key=lambda column: column[1])
    found = [*best_pairs(first, second, cost, fits)]
    every = [(cost(row, column), row, column) for row in first for column in second if fits(row, column)]
    assert [pair[0] for pair in found] == sorted(pair[0] for pair in every)
    assert sorted(found) == sorted(every)


def test_pruned_search_equals_brute_force_over_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bool] = []
    fits = RankedPlan.fits.fget
    assert fits is not None

    def counted(self: RankedPlan) -> bool:
        checked.append(True)
        return bool(fits(self))

    monkeypatch.setattr(RankedPlan, "fits", property(counted))
    given_plan = plan("1x2xH100", "1.5b")
    first = [seconds for _, (seconds, _) in zip(range(20), ranked(given_plan), strict=False)]
    pruned = len(checked)
    every = sorted(
        joined.seconds
        for base in search.bases(given_plan)
        for rollout in search.rollout_options(base)
        for trainer in search.train_options(base)
        if (joined := base.having(trainer | rollout)).fits
    )
    assert first == pytest.approx(every[:20])
    assert pruned < len(every) / 5


@pytest.mark.parametrize("smaller_and_larger", [("1x4xH100", "1x8xH100"), ("1x8xH100", "2x8xH100"), ("1x1xH200", "1x2xH200")])
def test_more_gpus_never_make_the_best_plan_slower(smaller_and_larger: tuple[str, str]) -> None:
    smaller, larger = (next(ranked(plan(cluster, "1.5b")))[0] for cluster in smaller_and_larger)
    assert larger <= smaller


def test_a_node_behind_a_slow_network_is_not_used() -> None:
    given_plan = plan("2x2xH100", "1.5b")
    cluster = replace(given_plan.cluster, hardware=replace(given_plan.cluster.hardware, network=1e7))
    _, best = next(ranked(replace(given_plan, cluster=cluster)))
    assert (best.config.trainer.nnodes, best.config.trainer.n_gpus_per_node) == (1, 2)


@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.strategy=megatron",)])
def test_command_lines_of_plans_are_accepted_and_have_the_predicted_time(more: tuple[str, ...]) -> None:
    given_plan = plan("1x4xH100", "7b", *more)
    line = words(given_plan.cluster, *more)
    found = alternatives(given_plan, line, 3, composed)
    assert len(found) == 3 and [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        config = composed([*line, *as_words(one.overrides)])
        again = RankedPlan(config, one.cluster, one.shapes, one.lengths, {})
        assert again.fits and again.seconds == pytest.approx(one.seconds)
        assert max(use.bytes or 0.0 for use in again.uses) <= 0.95 * one.cluster.hardware.memory


def test_plan_that_the_checks_refuse_is_left_out() -> None:
    given_plan = plan("1x4xH100", "7b")
    line = words(given_plan.cluster)
    best = alternatives(given_plan, line, 1, composed)[0]

    def refusing(command: Sequence[str]) -> PPOConfig:
        if {*as_words(best.overrides)} <= {*command}:
            raise ConfigError("refused")
        return composed(command)

    assert best.overrides not in [one.overrides for one in alternatives(given_plan, line, 2, refusing)]


def test_nothing_fits_a_gpu_that_is_too_small() -> None:
    assert not [*candidates(plan("1x1xL40S", "32b"))]


def test_numbers_of_gpus_are_powers_of_two_and_all() -> None:
    assert powers(1) == [1] and powers(6) == [1, 2, 4, 6] and powers(8) == [1, 2, 4, 8]
