"""Conversion of a composed tree to a typed configuration, and one-line errors."""

import dataclasses
import os
from typing import Any

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.load import load_ppo, load_sft
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return dataclasses.asdict(compose("ppo_trainer", PPOConfig))


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return tree | {name: with_value(tree[name], rest, value) if rest else value}


def loaded(tree: dict[str, Any], key: str, value: Any) -> Any:
    """Value of ``key`` after ``value`` has been loaded."""
    node: Any = load_ppo(with_value(tree, key, value))
    for name in key.split("."):
        node = dataclasses.asdict(node)[name] if dataclasses.is_dataclass(node) and not isinstance(node, type) else node[name]
    return node


def complaint(tree: dict[str, Any], key: str, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ppo(with_value(tree, key, value))
    return str(caught.value)


def test_a_loaded_configuration_equals_its_tree_and_is_frozen(defaults: dict[str, Any]) -> None:
    config = load_ppo(defaults)
    assert dataclasses.asdict(config) == defaults
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("actor_rollout_ref.actor.optim.lr", 1, 1.0),
        ("actor_rollout_ref.actor.optim.lr", 1e-6, 1e-6),
        ("actor_rollout_ref.actor.optim.betas", [0, 0.5], (0.0, 0.5)),
        ("data.train_files", "a.parquet", ["a.parquet"]),
        ("data.val_files", ["a.parquet", "~/b.parquet"], ["a.parquet", os.path.expanduser("~/b.parquet")]),
        ("actor_rollout_ref.model.path", "~/models/x", os.path.expanduser("~/models/x")),
        ("actor_rollout_ref.model.path", "a~/b", "a~/b"),
        ("trainer.logger", "console", ["console"]),
        ("trainer.experiment_name", 2024, "2024"),
        ("trainer.total_training_steps", None, None),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32", "float32"),
        ("actor_rollout_ref.rollout.dtype", "bf16", "bfloat16"),
        ("algorithm.adv_estimator", "grpo_vectorized", "grpo"),
        ("critic.strategy", "fsdp2", "fsdp"),
        ("ray_kwargs.ray_init", {"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": {"env_vars": {"A": "1"}}}),
    ],
)
def test_valid_values_are_converted(defaults: dict[str, Any], key: str, value: Any, result: Any) -> None:
    found = loaded(defaults, key, value)
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("trainer.seed", "abc", 'trainer.seed="abc": must be a valid integer'),
        ("trainer.seed", 1.5, "trainer.seed=1.5: must be a valid integer"),
        ("trainer.seed", True, "trainer.seed=true: must be a valid integer"),
        ("trainer.seed", None, "trainer.seed=null: must be a valid integer"),
        ("trainer.total_training_steps", "x", 'trainer.total_training_steps="x": must be a valid integer or null'),
        ("trainer.nnodes", 0, "trainer.nnodes=0: must be greater than 0"),
        ("trainer.val_only", "true", 'trainer.val_only="true": must be true or false'),
        ("trainer.val_only", 1, "trainer.val_only=1: must be true or false"),
        ("trainer.device", "cudaa", 'trainer.device="cudaa": must be one of cuda, cpu; did you mean cuda?'),
        ("trainer.dry_run", True, "trainer.dry_run=true: must be one of config, full or null"),
        ("trainer.experiment_name", True, "trainer.experiment_name=true: must be a valid string"),
        ("trainer.project_name", ["a"], 'trainer.project_name=["a"]: must be a valid string'),
        ("actor_rollout_ref.actor.optim.lr", "1e-6x", 'actor_rollout_ref.actor.optim.lr="1e-6x": must be a valid number'),
        ("actor_rollout_ref.actor.optim.lr", float("nan"), "actor_rollout_ref.actor.optim.lr=nan: must be a finite number"),
        (
            "actor_rollout_ref.actor.entropy_coeff",
            float("-inf"),
            "actor_rollout_ref.actor.entropy_coeff=-inf: must be a finite number",
        ),
        (
            "actor_rollout_ref.actor.optim.betas",
            [0.9, 2],
            "actor_rollout_ref.actor.optim.betas.1=2: must be less than 1",
        ),
        ("data.train_files", 3, "data.train_files=3: must be a list"),
        ("trainer.device", ["cuda"], 'trainer.device=["cuda"]: must be one of cuda, cpu; did you mean cuda?'),
        ("critic", None, "critic=null: must have keys below it"),
        ("critic.fsdp_config", "fsdp", 'critic.fsdp_config="fsdp": must have keys below it'),
        ("trainer.sede", 1, "trainer.sede: there is no such key; did you mean trainer.seed?"),
        ("trainer.project_name", "${nope}", "trainer.project_name: Interpolation key 'nope' not found; refer to an existing key"),
    ],
)
def test_an_invalid_value_is_an_error_of_one_line(defaults: dict[str, Any], key: str, value: Any, line: str) -> None:
    assert complaint(defaults, key, value) == line


def test_all_problems_are_reported_together(defaults: dict[str, Any]) -> None:
    tree = with_value(with_value(defaults, "trainer.seed", "x"), "data.seed", "y")
    with pytest.raises(ConfigError) as caught:
        load_ppo(tree)
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["data.seed", "trainer.seed"]


def test_a_missing_key_and_a_configuration_without_a_built_in_base_are_refused(defaults: dict[str, Any]) -> None:
    trainer = {name: value for name, value in defaults["trainer"].items() if name != "seed"}
    assert complaint(defaults, "trainer", trainer) == "trainer.seed: missing; set a value"
    with pytest.raises(ConfigError, match="must extend a built-in one; add `defaults: "):
        load_ppo({"trainer": {"seed": 1}})


def test_a_supervised_configuration_equals_its_tree() -> None:
    tree = dataclasses.asdict(compose("sft_trainer", SFTConfig))
    assert dataclasses.asdict(load_sft(tree)) == tree
