"""`placement`: pools on the run's nodes, and one-line errors with the arithmetic if they do not fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.placement import ROLES, PlacedRolesConfig, Placement, PlacementConfig, PoolConfig, place
from configs.schema.ppo import PPOConfig

DEFAULTS = compose("ppo_trainer", PPOConfig, [])
FOUR = ("actor", "ref", "critic", "rollout")
Sizes = dict[str, tuple[int, int, float]]


def placed(layout: Any, nodes: int, gpus: int, roles: Any = FOUR, pools: Sizes | None = None, **named: str) -> Placement:
    sizes = {name: PoolConfig(nodes=n, gpus=g, fraction=part) for name, (n, g, part) in (pools or {}).items()}
    of_roles = PlacedRolesConfig(**(dict.fromkeys(ROLES) | named))
    config = PlacementConfig(layout=layout, pools=sizes, roles=of_roles)
    return place(config, replace(DEFAULTS.trainer, nnodes=nodes, n_gpus_per_node=gpus), roles)


def layout_of(place: Placement) -> dict[str, tuple[tuple[str, ...], list[tuple[int, int]]]]:
    """{pool: (its roles, (node, GPU) of each rank)}."""
    return {pool.name: (pool.roles, pool.slots) for pool in place.pools}


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        placed(*args, **kwargs)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_colocate_all_is_one_pool_of_all_gpus() -> None:
    place = placed("colocate_all", 2, 2)
    assert layout_of(place) == {"workers": (FOUR, [(0, 0), (0, 1), (1, 0), (1, 1)])}
    assert place.pools[0].sizes == "trainer.nnodes * trainer.n_gpus_per_node = 2 * 2" and place.n_gpus == 4


def test_colocate_pairs_halves_each_node_or_the_nodes() -> None:
    pair = ("actor", "ref", "rollout")
    assert layout_of(placed("colocate_pairs", 1, 4)) == {
        "actor": (pair, [(0, 0), (0, 1)]),
        "critic": (("critic",), [(0, 2), (0, 3)]),
    }
    assert layout_of(placed("colocate_pairs", 2, 1, ("actor", "rollout", "reward"))) == {
        "actor": (("actor", "rollout"), [(0, 0)]),
        "critic": (("reward",), [(1, 0)]),
    }
    assert [pool.slots for pool in placed("colocate_pairs", 3, 2).pools] == [
        [(n, 0) for n in range(3)],
        [(n, 1) for n in range(3)],
    ]


def test_split_gives_each_role_of_the_run_its_own_pool() -> None:
    assert [(pool.name, pool.slots) for pool in placed("split", 1, 3, ("rollout", "actor", "critic")).pools] == [
        ("actor", [(0, 0)]),
        ("critic", [(0, 1)]),
        ("rollout", [(0, 2)]),
    ]


def test_pools_change_the_sizes_of_a_layout() -> None:
    sizes: Sizes = {"actor": (1, 3, 1.0), "critic": (1, 1, 1.0)}
    assert [pool.slots for pool in placed("colocate_pairs", 1, 4, pools=sizes).pools] == [[(0, 0), (0, 1), (0, 2)], [(0, 3)]]
    line = refusal("colocate_pairs", 1, 4, pools={"actor": (1, 3, 1.0), "critics": (1, 1, 1.0)})
    assert line.startswith("placement.pools=actor, critics: placement.layout=colocate_pairs has the pools actor, critic in")


def test_custom_layout_has_named_pools_and_fractions() -> None:
    """Pools whose fractions sum to at most 1 share GPUs; the actor's pool comes first, whatever the order of the keys."""
    sizes: Sizes = {"judges": (1, 2, 0.4), "train": (1, 2, 0.6), "engines": (2, 1, 1.0)}
    place = placed("custom", 2, 3, pools=sizes, actor="train", critic="judges", rollout="engines")
    assert layout_of(place) == {
        "train": (("actor", "ref"), [(0, 0), (0, 1)]),
        "judges": (("critic",), [(0, 0), (0, 1)]),
        "engines": (("rollout",), [(0, 2), (1, 2)]),
    }
    assert place.n_gpus == 4 and place.pool("reward").name == "train", "a role that the run does not have is in the actor's pool"
    assert place.pools[0].in_words() == "train (actor, ref): node 0, GPUs 0-1, 0.6 of each"
    assert place.pool("rollout").in_words() == "engines (rollout): nodes 0-1, GPU 2"


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([0.25, 0.3, 0.5, 0.7, 1.0])), min_size=2, max_size=4
    ),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_no_gpu_is_assigned_more_than_once(sizes: list[tuple[int, int, float]], nodes: int, gpus: int) -> None:
    """Any request either fits, and each pool has its size, or is refused."""
    pools = dict(zip(FOUR, sizes, strict=False))
    try:
        found = placed("custom", nodes, gpus, tuple(pools), pools=pools, **{name: name for name in pools}).pools
    except ConfigError:
        return
    taken: dict[tuple[int, int], float] = {}
    for pool in found:
        assert (pool.nnodes, pool.n_gpus_per_node, pool.fraction) == pools[pool.name]
        assert len(pool.slots) == len(set(pool.slots)) == pool.nnodes * pool.n_gpus_per_node
        for node, gpu in pool.slots:
            assert 0 <= node < nodes and 0 <= gpu < gpus
            taken[node, gpu] = taken.get((node, gpu), 0.0) + pool.fraction
    assert max(taken.values()) <= 1 + 1e-6


def test_gpus_that_do_not_divide_equally_are_refused() -> None:
    assert refusal("split", 1, 6) == (
        "placement.layout=split: 4 pools (actor, ref, critic, rollout) cannot share trainer.nnodes * "
        "trainer.n_gpus_per_node = 1 * 6 GPUs equally: 4 divides neither 1 node (1 = 0 * 4 + 1) nor the 6 GPUs of a node "
        "(6 = 1 * 4 + 2); use placement=colocate_pairs (actor, ref, rollout | critic), trainer.n_gpus_per_node=8, or the size of "
        "each in placement.pools"
    )


def test_pools_with_too_many_gpus_are_refused() -> None:
    pools: Sizes = {"a": (1, 4, 1.0), "b": (1, 4, 0.5)}
    assert refusal("custom", 1, 5, pools=pools, actor="a", critic="b") == (
        "placement.pools: a 1 * 4 * 1 + b 1 * 4 * 0.5 = 6 GPUs, but trainer.nnodes * trainer.n_gpus_per_node = 1 * 5 = 5"
    )
    wide: Sizes = {"a": (1, 1, 0.5), "b": (1, 2, 0.8)}
    assert refusal("custom", 1, 2, ("actor", "critic"), pools=wide, actor="a", critic="b") == (
        "placement.pools: a 1 * 1 * 0.5 + b 1 * 2 * 0.8 = 2.1 GPUs, but trainer.nnodes * trainer.n_gpus_per_node = 1 * 2 = 2"
    )


def test_a_pool_without_consecutive_free_gpus_is_refused() -> None:
    pools: Sizes = {"a": (2, 1, 1.0), "b": (1, 2, 0.6)}
    assert refusal("custom", 2, 2, pools=pools, actor="a", critic="b") == (
        "placement.pools.b: 1 * 2 * 0.6 (nodes * gpus * fraction): no 2 consecutive GPUs with 0.6 of each free on 1 "
        "node(s); of trainer.nnodes * trainer.n_gpus_per_node = 2 * 2 GPUs, the previous pools leave: node 0: 0, 1; node 1: 0, 1"
    )


def test_unknown_and_unused_pools_are_refused() -> None:
    pools: Sizes = {"train": (1, 2, 1.0), "value": (1, 2, 1.0)}
    assert refusal("custom", 1, 4, pools=pools, actor="train", critic="valu") == (
        "placement.roles.critic=valu: unknown pool; placement.pools has train, value; did you mean value?"
    )
    assert refusal("custom", 1, 4, pools=pools, critic="value") == (
        "placement.roles.actor=null: placement.layout=custom needs the actor's pool; placement.pools has train, value"
    )
    assert refusal("custom", 1, 4, ("actor", "rollout"), pools=pools, actor="train", critic="value") == (
        "placement.pools.value: no role of this run uses this pool; the roles are actor, rollout (placement.roles)"
    )
    assert "pool names become part of file names" in refusal("custom", 1, 4, pools={"../x": (1, 1, 1.0)}, actor="../x")


def test_keys_of_the_custom_layout_are_refused_in_others() -> None:
    line = "placement.roles.critic=b: placement.layout=split assigns roles itself; set layout=custom"
    assert refusal("split", 1, 4, critic="b") == line
    assert "colocate_all has one pool" in refusal("colocate_all", 1, 4, pools={"a": (1, 1, 1.0)})
    assert "neither a critic nor a reward model" in refusal("colocate_pairs", 1, 4, ("actor", "ref", "rollout"))


def test_example_of_the_documentation_is_placed() -> None:
    page = (Path(__file__).parents[3] / "docs/placement.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    tree: Any = OmegaConf.to_container(OmegaConf.create(example))
    pools = {name: (pool["nodes"], pool["gpus"], pool["fraction"]) for name, pool in tree["placement"]["pools"].items()}
    place = placed("custom", 1, 8, (*FOUR, "reward"), pools=pools, **tree["placement"]["roles"])
    assert layout_of(place) == {
        "train": (("actor", "ref"), [(0, n) for n in range(4)]),
        "value": (("critic",), [(0, 4), (0, 5)]),
        "judge": (("reward",), [(0, 4), (0, 5)]),
        "engines": (("rollout",), [(0, 6), (0, 7)]),
    }
