"""Search: equal to brute force, never worse with more GPUs, and only plans that the command line accepts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from scripts.bench.shapes import SHAPES
from trainer.main_plan import composed
from trainer.planner import search
from trainer.planner.hardware import GpuCluster, load_hardware
from trainer.planner.memory_estimate import estimate
from trainer.planner.memory_model import Shape
from trainer.planner.plan_report import placement_line
from trainer.planner.search import (
    Checked,
    Overrides,
    RankedPlan,
    alternatives,
    as_words,
    best_pairs,
    candidates,
    counts,
    placements,
    ranked,
)
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


def checked(line: Sequence[str]) -> Checked:
    return lambda overrides: composed([*line, *as_words(overrides)])


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

    def possible(row: tuple[int, float]) -> bool:
        return any(fits(row, column) for column in second)

    found = [*best_pairs(first, second, cost, fits, possible)]
    assert found == [*best_pairs(first, second, cost, fits)]
    every = [(cost(row, column), row, column) for row in first for column in second if fits(row, column)]
    assert [pair[0] for pair in found] == sorted(pair[0] for pair in every)
    assert sorted(found) == sorted(every)


@st.composite
def plans(draw: st.DrawFn, nodes: int, gpus: int) -> tuple[RankedPlan, list[str]]:
    """A command on a random cluster of at most ``nodes`` x ``gpus``, and its words."""
    heads, groups = draw(st.sampled_from([4, 6, 8])), draw(st.sampled_from([1, 2]))
    sizes = {
        "hidden_size": draw(st.sampled_from([1024, 3584, 8192])), "num_hidden_layers": draw(st.integers(8, 48)),
        "num_attention_heads": heads * groups, "num_key_value_heads": heads, "head_dim": 128,
        "intermediate_size": draw(st.sampled_from([4096, 20480])), "vocab_size": 152064,
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    hardware = load_hardware(draw(st.sampled_from(["h100", "l40s"])))
    rates = {key: getattr(hardware, key) * draw(st.sampled_from([0.03, 1.0, 10.0])) for key in ("link", "network", "latency")}
    cluster = GpuCluster(draw(st.integers(1, nodes)), draw(st.integers(1, gpus)), replace(hardware, **rates))
    more = draw(st.sampled_from(VARIANTS))
    lengths = ResponseLengths(256, draw(st.integers(20, 1000)), 1024)
    line = words(cluster, *more)
    names = ["actor_rollout_ref.actor", "actor_rollout_ref.ref", *(["critic"] if "algorithm.adv_estimator=gae" in more else [])]
    shapes = dict.fromkeys(names, Shape.of(sizes))
    return RankedPlan(compose("ppo_trainer", PPOConfig, line), cluster, shapes, lengths, {}), line


VARIANTS = [
    (),
    ("actor_rollout_ref.actor.strategy=megatron",),
    ("algorithm.adv_estimator=gae", "critic.model.path=${actor_rollout_ref.model.path}"),
    ("algorithm.use_kl_in_reward=true", "data.train_batch_size=48", "actor_rollout_ref.actor.ppo_mini_batch_size=24"),
]


def first(plan: RankedPlan, count: int) -> list[float]:
    return [seconds for _, (seconds, _) in zip(range(count), ranked(plan), strict=False)]


@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(drawn=plans(2, 3))
def test_pruned_search_equals_brute_force_over_all_plans(drawn: tuple[RankedPlan, list[str]]) -> None:
    one, _ = drawn
    every = sorted(
        joined.seconds
        for base in search.bases(one)
        for rollout in search.rollout_options(base)
        for trainer in search.train_options(base)
        if (joined := base.having(trainer | rollout)).fits
    )
    assert first(one, 20) == pytest.approx(every[:20])
    for base in search.bases(one):
        for seconds, _ in islice(candidates(base), 1):
            assert search.bound(base) <= (1 + 1e-9) * seconds


def test_pruned_search_checks_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[RankedPlan] = []
    monkeypatch.setattr(RankedPlan, "fits", property(lambda self: checked.append(self) or True))
    one = plan("2x8xH100", "1.5b")
    assert len(first(one, 20)) == 20
    assert len(checked) <= 25


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(drawn=plans(5, 8), nodes=st.integers(0, 2), gpus=st.integers(0, 3))
def test_more_gpus_never_make_the_best_plan_slower(drawn: tuple[RankedPlan, list[str]], nodes: int, gpus: int) -> None:
    smaller = drawn[0]
    cluster = replace(smaller.cluster, nodes=smaller.cluster.nodes + nodes, gpus=smaller.cluster.gpus + gpus)
    size = {"trainer.nnodes": cluster.nodes, "trainer.n_gpus_per_node": cluster.gpus}
    larger = RankedPlan(search.replaced(smaller.config, size), cluster, smaller.shapes, smaller.lengths, {})
    assert first(larger, 1) <= first(smaller, 1) or not first(smaller, 1)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(drawn=plans(2, 8))
def test_offered_plans_pass_the_checks_of_a_run_and_fit_its_estimate(drawn: tuple[RankedPlan, list[str]]) -> None:
    one, line = drawn
    for offered in alternatives(one, 2, checked(line)):
        config = composed([*line, *as_words(offered.overrides)])
        place = placement_of(config, has_critic="critic" in one.shapes)
        memory = one.cluster.hardware.memory
        assert max(use.bytes or 0.0 for use in estimate(config, place, one.shapes, memory)) <= 0.95 * memory
        assert RankedPlan(config, one.cluster, one.shapes, one.lengths, {}).seconds == pytest.approx(offered.seconds)


def test_a_node_behind_a_slow_network_is_not_used() -> None:
    given_plan = plan("2x2xH100", "1.5b")
    cluster = replace(given_plan.cluster, hardware=replace(given_plan.cluster.hardware, network=1e7))
    _, best = next(ranked(replace(given_plan, cluster=cluster)))
    assert (best.config.trainer.nnodes, best.config.trainer.n_gpus_per_node) == (1, 2)


@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.strategy=megatron",)])
def test_command_lines_of_plans_are_accepted_and_have_the_predicted_time(more: tuple[str, ...]) -> None:
    given_plan = plan("1x4xH100", "7b", *more)
    line = words(given_plan.cluster, *more)
    found = alternatives(given_plan, 3, checked(line))
    assert len(found) == 3 and [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        config = composed([*line, *as_words(one.overrides)])
        again = RankedPlan(config, one.cluster, one.shapes, one.lengths, {})
        assert again.fits and again.seconds == pytest.approx(one.seconds)
        assert max(use.bytes or 0.0 for use in again.uses) <= 0.95 * one.cluster.hardware.memory


def test_plan_that_the_checks_refuse_is_left_out() -> None:
    given_plan = plan("1x4xH100", "7b")
    line = words(given_plan.cluster)
    best = alternatives(given_plan, 1, checked(line))[0]

    def refusing(overrides: Overrides) -> PPOConfig:
        if best.overrides.items() <= overrides.items():
            raise ConfigError("refused")
        return checked(line)(overrides)

    assert best.overrides not in [one.overrides for one in alternatives(given_plan, 2, refusing)]


def test_nothing_fits_a_gpu_that_is_too_small() -> None:
    assert not [*candidates(plan("1x1xL40S", "32b"))]


def test_larger_clusters_have_all_numbers_of_smaller_ones() -> None:
    assert counts(18) == [*range(1, 17), 18]
    assert all({*counts(n)} <= {*counts(n + 1)} and counts(n)[-1] > n / (1 + 1 / 8) for n in range(1, 300))


def test_placements_differ_in_nothing_else_and_the_fastest_is_first() -> None:
    one = plan("1x4xH100", "1.5b", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=false")
    line = words(one.cluster, "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=false")
    found = placements(one, checked(line))
    # Pairs need a critic or a reward model.
    assert {other.config.placement.layout for other in found} == {"colocate_all", "split"}
    assert all(other.overrides.keys() <= {"placement.layout"} for other in found)
    assert found[0].seconds == min(other.seconds for other in found)
    layouts = [other.config.placement.layout for other in found]
    assert placement_line(found) == (
        f"placement: {layouts[0]}, {found[0].seconds:.3g} s a step with the other settings as given, "
        f"against {found[1].seconds:.3g} s of {layouts[1]}"
    )


def test_one_gpu_leaves_no_placement_to_choose() -> None:
    one = plan("1x1xH100", "0.5b")
    found = placements(one, checked(words(one.cluster)))
    assert [other.config.placement.layout for other in found] == ["colocate_all"]
    assert placement_line(found).endswith("; no other placement is valid and fits")


def test_a_placement_that_does_not_fit_is_not_named() -> None:
    one = plan("1x2xL40S")
    assert placements(one, checked(words(one.cluster))) == []
    assert placement_line([]) == "placement: none fits with the other settings as given"
