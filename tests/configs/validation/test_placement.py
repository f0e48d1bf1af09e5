"""Checks of roles in pools: every check counts the workers of the role's own pool."""

import re

import pytest

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.configs.validation.test_programs import ACTOR, ROLLOUT, ppo_lines

PAIRS = ("placement=colocate_pairs", "trainer.n_gpus_per_node=6")
CUSTOM = (
    "placement=custom", "trainer.n_gpus_per_node=4", "placement.pools.a={nodes: 1, gpus: 3, fraction: 1}",
    "placement.pools.b={nodes: 1, gpus: 1, fraction: 1.0}", "placement.roles.actor=a", "placement.roles.critic=b",
)  # fmt: skip
HALF = "3 workers (pool actor: 1 node * 6 GPUs / 2 pools = 1 * 3)"


def shared(fraction: float) -> list[str]:
    """Overrides with which the engine shares GPUs with the critic."""
    pool = f"{{nodes: 1, gpus: 2, fraction: {fraction}}}"
    roles = ("placement.roles.actor=a", "placement.roles.critic=b")
    return ["placement=custom", "trainer.n_gpus_per_node=2", f"placement.pools.a={pool}", f"placement.pools.b={pool}", *roles]


def test_a_valid_placement_gives_a_note_with_its_layout() -> None:
    note = "placement.layout=colocate_pairs: actor (actor, rollout): node 0, GPUs 0-2; critic (critic): node 0, GPUs 3-5"
    assert ppo_lines(*PAIRS) == [note]
    assert ppo_lines("placement=colocate_all") == []


def test_an_impossible_placement_is_the_only_error() -> None:
    (line,) = ppo_lines("placement=split", "trainer.n_gpus_per_node=4", "data.train_batch_size=3")
    assert line.startswith("error: placement.layout=split: 3 pools (actor, critic, rollout) cannot share trainer.nnodes")


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (["placement=split", "trainer.n_gpus_per_node=2"], ["placement=colocate_pairs", "trainer.n_gpus_per_node=3"]),
        (["placement=split", "trainer.n_gpus_per_node=1"], ["placement=colocate_all", "trainer.n_gpus_per_node=3"]),
        (["placement=colocate_pairs", "trainer.n_gpus_per_node=3"], ["placement=colocate_all", "trainer.n_gpus_per_node=4"]),
    ],
)
def test_advice_for_gpus_that_do_not_divide_is_a_placement_that_works(words: list[str], advised: list[str]) -> None:
    (line,) = ppo_lines(*words)
    assert re.findall(r"(?:placement|trainer\.n_gpus_per_node)=\w+", line.partition("; use ")[2]) == advised
    for override in advised:
        batch = ["data.train_batch_size=12", f"{ACTOR}.ppo_mini_batch_size=12"]
        assert not [line for line in ppo_lines(*words, *batch, override) if line.startswith("error")]
    assert line.endswith("or the size of each in placement.pools") == (words[-1] == "trainer.n_gpus_per_node=3")


def test_sizes_are_checked_against_the_workers_of_the_roles_pool() -> None:
    assert ppo_lines(*PAIRS, f"{ACTOR}.fsdp_config.fsdp_size=2")[0] == (
        f"error: {ACTOR}.fsdp_config.fsdp_size=2: does not divide {HALF} (3 = 1 * 2 + 1); use a divisor"
    )
    assert ppo_lines(*PAIRS, "rollout=vllm")[0] == (
        f"error: {ROLLOUT}.tensor_model_parallel_size=2: does not divide {HALF} (3 = 1 * 2 + 1); use a divisor"
    )
    assert ppo_lines(*PAIRS, f"{ACTOR}.ppo_micro_batch_size=8")[0].endswith(
        "the number of sequences is not divisible by the data-parallel size (8 / 3 = 2.667); use ppo_micro_batch_size_per_gpu"
    )
    small = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")
    (line,) = ppo_lines(*CUSTOM, *small)
    assert line.endswith(
        "2 * 1 = 2 sequences per step are fewer than 3 workers (placement.pools.a: nodes * gpus = 1 * 3); increase it"
    )
    (line,) = ppo_lines(*CUSTOM[:-2], "placement.roles.actor=b", "placement.roles.critic=a", *small)
    assert line.endswith("fewer than 3 workers (placement.pools.a: nodes * gpus = 1 * 3); increase it"), "the critic's"
    assert ppo_lines(*CUSTOM, "critic.ppo_micro_batch_size=7") == ppo_lines(*CUSTOM), "one worker takes any number"


def test_models_on_different_gpus_can_be_split_differently() -> None:
    cut = ("algorithm.adv_estimator=gae", f"{ACTOR}.strategy=megatron", "critic.megatron.tensor_model_parallel_size=2")
    assert compose("ppo_trainer", PPOConfig, cut).critic.megatron.tensor_model_parallel_size == 1
    assert compose("ppo_trainer", PPOConfig, (*cut, "placement=colocate_pairs")).critic.megatron.tensor_model_parallel_size == 2
    assert not any(line.startswith("error") for line in ppo_lines(*cut, "placement=colocate_pairs"))


def test_an_engine_on_a_shared_gpu_must_not_sleep_or_exceed_its_fraction() -> None:
    (line,) = ppo_lines(*shared(0.5))
    assert line.startswith("error: placement.pools.a.fraction=0.5: memory of a shared GPU is reserved once")
    awake = f"{ROLLOUT}.free_cache_engine=false"
    assert [line.partition(":")[0] for line in ppo_lines(*shared(0.5), awake)] == ["placement.layout=custom"]
    (line,) = ppo_lines(*shared(0.4), awake, "rollout=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.5")
    assert line.endswith("gpu_memory_utilization=0.5 is a fraction of the whole GPU and must not exceed the pool's")


def test_an_engine_does_not_share_the_gpu_that_sends_its_weights() -> None:
    half, quarter = "{nodes: 1, gpus: 1, fraction: 0.5}", "{nodes: 1, gpus: 2, fraction: 0.25}"
    words = (
        "placement=custom", f"placement.pools.a={half}", "placement.roles.actor=a", "placement.roles.rollout=b",
        f"{ROLLOUT}.free_cache_engine=false", "rollout=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.2",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    )  # fmt: skip
    for pool, n_gpus in ((half, 1), (quarter, 2)):
        here = (*words, f"placement.pools.b={pool}", f"trainer.n_gpus_per_node={n_gpus}")
        assert [line for line in ppo_lines(*here, "trainer.device=cuda") if "NCCL does not connect two processes" in line]
        assert not [line for line in ppo_lines(*here, "trainer.device=cpu") if "NCCL" in line]


def test_the_local_backend_refuses_several_pools() -> None:
    half = [text.replace("gpus: 2", "gpus: 1") for text in shared(0.5)]
    local = ("trainer.backend=local", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.free_cache_engine=false")
    (line,) = ppo_lines(*half, *local)
    assert line.startswith(
        "error: trainer.backend=local: runs a single worker in this process, but pools a, b need separate processes"
    )


@pytest.mark.parametrize("layout", ["auto", "colocate_all", "colocate_pairs", "split", "custom"])
def test_a_placement_group_and_its_leaf_give_the_same_configuration(layout: str) -> None:
    group, leaf = (compose("ppo_trainer", PPOConfig, [word]) for word in (f"placement={layout}", f"placement.layout={layout}"))
    assert group == leaf and group.placement.layout == layout


def test_invalid_fractions_and_role_names_are_refused() -> None:
    pool = "placement.pools.a={nodes: 1, gpus: 2, fraction: 1.5}"
    with pytest.raises(ValueError, match=r"placement\.pools\.a\.fraction=1\.5: .*less than or equal to 1"):
        compose("ppo_trainer", PPOConfig, [pool])
    with pytest.raises(ValueError, match=r"placement\.roles\.critc: .*did you mean placement\.roles\.critic\?"):
        compose("ppo_trainer", PPOConfig, ["placement.roles.critc=a"])
