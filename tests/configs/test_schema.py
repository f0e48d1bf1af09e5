"""YAML trees and dataclasses have the same keys, and the YAML explains each leaf."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.argv import groups_of
from configs.base.keys import CONFIG_DIR, described, keys_of
from configs.schema.evaluation import EvaluationConfig, ExportConfig
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.schema.serve import ServeConfig
from configs.schema.serve_reward import ServeRewardConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig

PROGRAMS = [
    ("ppo_trainer", PPOConfig),
    ("sft_trainer", SFTConfig),
    ("reward_model_trainer", RewardModelConfig),
    ("dpo_trainer", DPOConfig),
    ("generation", GenerationConfig),
    ("evaluation", EvaluationConfig),
    ("parity", ParityConfig),
    ("export", ExportConfig),
    ("serve", ServeConfig),
    ("serve_reward", ServeRewardConfig),
]
# Keys of two programs with different meanings or intentionally different defaults.
OWN_DEFAULTS = {"trainer.default_local_dir", "data.shuffle", "actor_rollout_ref.model.enable_gradient_checkpointing"}
OWN_DEFAULTS_OF = {
    # At a temperature of 1 a test cannot show whether an engine uses it. The path is that of the key `model`.
    "parity": {"actor_rollout_ref.rollout.temperature", "actor_rollout_ref.model.path"},
    "evaluation": {"timeouts.reward"},  # all responses are scored in one round
    # One worker is enough for a server.
    "serve": {
        "trainer.backend",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.model.path",
        "server.max_connections",
        "server.max_request_mb",
        "server.port",
        "server.token_env",
    },
    "serve_reward": {"trainer.backend", "trainer.n_gpus_per_node"},  # one worker is enough for a server
}


def yaml_tree(root: str) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / f"{root}.yaml"))
    del tree["defaults"]
    return tree


def yaml_leaves(node: dict[str, Any], prefix: str = "", whole: Collection[str] = ()) -> set[str]:
    """Dotted keys whose value is no mapping; an empty mapping is a value, and so is any value of a key in ``whole``."""
    found: set[str] = set()
    for name, value in node.items():
        key = prefix + name
        found |= yaml_leaves(value, f"{key}.", whole) if isinstance(value, dict) and value and key not in whole else {key}
    return found


@pytest.mark.parametrize(("root", "schema"), PROGRAMS)
def test_yaml_and_schema_have_the_same_leaves(root: str, schema: type) -> None:
    leaves = keys_of(schema).leaves
    assert yaml_leaves(yaml_tree(root), whole=leaves) == set(leaves)


@pytest.mark.parametrize(("root", "schema"), PROGRAMS)
def test_every_leaf_has_a_comment_or_another_of_its_name_has(root: str, schema: type) -> None:
    """A leaf that follows another key needs none."""
    written = described(CONFIG_DIR / f"{root}.yaml")
    explained = {key.split(".")[-1] for key, leaf in written.items() if leaf.comment}
    silent = [
        key
        for key in keys_of(schema).leaves
        if key.split(".")[-1] not in explained and not (key in written and written[key].value.startswith("${"))
    ]
    assert silent == []


def test_every_leaf_of_training_has_a_comment_of_its_own() -> None:
    written = described(CONFIG_DIR / "ppo_trainer.yaml")
    assert [key for key in keys_of(PPOConfig).leaves if not written[key].comment] == []


def test_training_has_at_most_408_keys() -> None:
    """Counted by keys_of: lines of the YAML that set a value."""
    assert len(keys_of(PPOConfig).leaves) <= 408
    assert set(described(CONFIG_DIR / "ppo_trainer.yaml")) == set(keys_of(PPOConfig).leaves)


@pytest.mark.parametrize("root", ["generation", "evaluation", "parity", "serve_reward"])
def test_keys_shared_with_training_have_its_defaults(root: str) -> None:
    """Each program's YAML is complete, so these defaults are copies, which must stay equal."""
    tree, training = (OmegaConf.load(CONFIG_DIR / f"{name}.yaml") for name in (root, "ppo_trainer"))
    shared = set(keys_of(dict(PROGRAMS)[root]).leaves) & set(keys_of(PPOConfig).leaves) - OWN_DEFAULTS
    shared -= OWN_DEFAULTS_OF.get(root, set())
    assert len(shared) > 25
    assert {key for key in shared if OmegaConf.select(tree, key) != OmegaConf.select(training, key)} == set()


NAME = {"trainer.experiment_name", "trainer.default_local_dir"}


@pytest.mark.parametrize(
    ("root", "other", "own"),
    [
        (
            "reward_model_trainer",
            "sft_trainer",
            {*NAME, "data.train_files", "data.val_files", "data.train_batch_size", "trainer.total_epochs"},
        ),
        ("dpo_trainer", "reward_model_trainer", {*NAME, "optim.lr"}),
    ],
)
def test_supervised_training_has_the_same_defaults_in_all_programs(root: str, other: str, own: set[str]) -> None:
    mine, others = (OmegaConf.load(CONFIG_DIR / f"{name}.yaml") for name in (root, other))
    shared = set(keys_of(dict(PROGRAMS)[root]).leaves) & set(keys_of(dict(PROGRAMS)[other]).leaves)
    assert len(shared) > 80
    assert {key for key in shared if OmegaConf.select(mine, key) != OmegaConf.select(others, key)} == own


OPTIONS = [
    (schema, path)
    for root, schema in PROGRAMS
    for group in groups_of(root)
    for path in sorted((CONFIG_DIR / group).glob("*.yaml"))
]


@pytest.mark.parametrize(("schema", "path"), OPTIONS, ids=lambda item: item.stem if isinstance(item, Path) else "")
def test_groups_and_recipes_set_only_existing_leaves(schema: type, path: Path) -> None:
    assert path.read_text().startswith("# @package _global_\n")
    tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    tree.pop("defaults", None)
    assert [key for key in yaml_leaves(tree) if not keys_of(schema).knows(key)] == []


def test_every_root_yaml_belongs_to_a_program() -> None:
    others = {"compat", "openrlhf", "ppo_megatron_trainer"}
    assert {path.stem for path in CONFIG_DIR.glob("*.yaml")} == {root for root, _ in PROGRAMS} | others


def test_every_option_of_a_group_belongs_to_a_program() -> None:
    hardware = CONFIG_DIR / "hardware"  # of the planner, no group
    assert {path for _, path in OPTIONS} == {path for path in CONFIG_DIR.glob("*/*.yaml") if path.parent != hardware}
