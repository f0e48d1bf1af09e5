"""Translation of OpenRLHF's placement of models into pools."""

import re

import pytest

from configs.base.keys import ConfigError
from configs.compat.openrlhf.rules import _nodes
from tests.configs.compat.openrlhf.commands import PPO, comment, dry_run, settings, translated


def pools(line: str) -> dict[str, tuple[int, int]]:
    """{pool: (nodes, GPUs of each)}"""
    found = re.findall(r"(\w+):\{nodes:(\d+),gpus:(\d+),fraction:1.0\}", settings(line)["placement.pools"])
    return {name: (int(nodes), int(gpus)) for name, nodes, gpus in found}


def roles(line: str) -> dict[str, str]:
    beginning = "placement.roles."
    return {key.removeprefix(beginning): pool for key, pool in settings(line).items() if key.startswith(beginning)}


def run_size(line: str) -> tuple[str, str]:
    found = settings(line)
    return found["trainer.nnodes"], found.get("trainer.n_gpus_per_node", "8")


def test_default_placement_has_a_pool_per_model() -> None:
    assert pools(PPO) == {"actor": (1, 8), "ref": (1, 8), "critic": (1, 8), "reward": (1, 8), "rollout": (1, 1)}
    assert roles(PPO) == {role: role for role in ("actor", "ref", "critic", "reward", "rollout")}
    assert run_size(PPO) == ("5", "8")


def test_colocated_pairs_share_pools() -> None:
    sizes = " ".join(f"--{role}_num_gpus_per_node 2" for role in ("actor", "ref", "critic", "reward"))
    line = f"{PPO} {sizes} --colocate_actor_ref --colocate_critic_reward --vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    assert pools(line) == {"actor": (1, 2), "critic": (1, 2), "rollout": (1, 4)}
    assert roles(line) == {"actor": "actor", "ref": "actor", "critic": "critic", "reward": "critic", "rollout": "rollout"}
    assert run_size(line) == ("1", "8")
    assert "2 engines * 2 = 4 GPUs, separate from the models; actor 1 * 2 + critic 1 * 2 + rollout 1 * 4 = 8 GPUs" in translated(
        line
    )


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        ("--advantage_estimator reinforce", {"actor", "ref", "reward"}),
        ("--init_kl_coef 0", {"actor", "critic", "reward"}),
        ("--remote_rm_url http://127.0.0.1:5000/get_reward", {"actor", "ref", "critic"}),
        ("--lora_rank 8", {"actor", "critic", "reward"}),  # the reference is the actor without its adapter
        ("--colocate_critic_reward --advantage_estimator reinforce", {"actor", "ref", "reward"}),
    ],
)
def test_unused_models_get_no_gpus(flags: str, used: set[str]) -> None:
    assert set(pools(PPO + flags)) == used | {"rollout"}
    assert dry_run(translated(PPO + flags)) == 0  # a pool without a role would be refused


def test_size_of_an_unused_model_is_ignored() -> None:
    line = comment(PPO + "--ref_num_nodes 2 --init_kl_coef 0", "--ref_num_nodes 2")
    assert line == "# --ref_num_nodes 2: implied: the run has no such model"


def test_all_colocated_models_have_the_default_layout() -> None:
    line = PPO + "--colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 4 --actor_num_nodes 2"
    found = settings(line)
    assert (found["trainer.nnodes"], found["trainer.n_gpus_per_node"]) == ("2", "8")
    assert found["placement.layout"] == "colocate_all" and "placement.pools" not in found
    assert found["actor_rollout_ref.rollout.free_cache_engine"] == "false"
    assert settings(line + " --vllm_enable_sleep")["actor_rollout_ref.rollout.free_cache_engine"] == "true"
    with pytest.raises(ConfigError, match=r"^--colocate_all_models: .* 3 engines \* 4 = 12 are not 2 nodes \* 8 = 16$"):
        translated(line + " --vllm_num_engines 3")


def test_an_engine_with_its_own_gpus_does_not_sleep() -> None:
    line = comment(PPO + "--vllm_enable_sleep", "--vllm_enable_sleep")
    assert line == "# --vllm_enable_sleep: implied: an engine with its own GPUs does not sleep"


def test_colocated_models_of_different_sizes_are_refused_if_used() -> None:
    with pytest.raises(
        ConfigError, match=r"^--colocate_actor_ref: .* actor 1 \* 8 and ref 2 \* 8 \(nodes \* GPUs\) are different$"
    ):
        translated(PPO + "--colocate_actor_ref --ref_num_nodes 2")
    assert pools(PPO + "--colocate_actor_ref --ref_num_nodes 2 --init_kl_coef 0").keys() == {
        "actor",
        "critic",
        "reward",
        "rollout",
    }


def test_embedded_engine_is_colocated_with_the_actor() -> None:
    line = "--pretrain sft --reward_pretrain rm --prompt_data p.parquet --colocate_actor_ref"
    assert roles(line) == {"actor": "actor", "ref": "actor", "critic": "critic", "reward": "reward"}
    assert settings(line).get("actor_rollout_ref.rollout.name", "embedded") == "embedded"
    assert dry_run(translated(line)) == 0


@pytest.mark.parametrize(
    ("engines", "cut", "pool"), [(1, 8, (1, 8)), (2, 8, (2, 8)), (3, 4, (3, 4)), (16, 1, (2, 8)), (5, 1, (1, 5)), (6, 2, (2, 6))]
)
def test_engines_do_not_span_nodes(engines: int, cut: int, pool: tuple[int, int]) -> None:
    line = f"{PPO} --vllm_num_engines {engines} --vllm_tensor_parallel_size {cut}"
    assert pools(line)["rollout"] == pool


def test_an_engine_over_nodes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--vllm_tensor_parallel_size 16: an engine is on one node, and 16 GPUs are more than 8$"
    ):
        translated(PPO + "--vllm_tensor_parallel_size 16")


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ([(1, 4)], (1, 4)),
        ([(2, 4)], (2, 4)),
        ([(1, 4), (1, 4)], (1, 8)),
        ([(1, 4), (1, 4), (1, 4)], (2, 8)),
        ([(1, 6), (1, 4), (1, 2)], (2, 8)),
        ([(2, 8), (1, 4)], (3, 8)),
        ([(1, 4), (2, 4)], (3, 8)),
        ([(1, 16), (1, 16)], (2, 16)),
    ],
)
def test_number_and_size_of_nodes_fit_the_pools(sizes: list[tuple[int, int]], nodes: tuple[int, int]) -> None:
    assert _nodes(sizes) == nodes
