"""Entries of reward.models over the defaults of reward.reward_model."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.reward_models import model_key, reward_models
from configs.schema.ppo import PPOConfig, RewardConfig


def reward(*overrides: str) -> RewardConfig:
    return compose("ppo_trainer", PPOConfig, overrides).reward


def test_missing_keys_of_an_entry_are_taken_from_the_defaults() -> None:
    config = reward(
        "reward.models={a: {path: x, weight: 0.5, fsdp_config: {param_offload: true}}}",
        "reward.models.b={path: ~/y, clip: [-1, 1]}".replace("~", "'~").replace("y,", "y',"),
        "reward.reward_model.max_length=77",
        "reward.reward_model.fsdp_config.dtype=fp32",
        "actor_rollout_ref.actor.strategy=megatron",
    )
    models = reward_models(config)
    assert [*models] == ["a", "b"] and [model_key(name, config) for name in models] == ["reward.models.a", "reward.models.b"]
    a, b = models.values()
    assert (a.path, a.weight, a.max_length, a.clip, a.normalize) == ("x", 0.5, 77, None, None)
    assert (a.fsdp_config.param_offload, a.fsdp_config.dtype, b.fsdp_config.param_offload) == (True, "float32", False)
    assert (b.weight, b.clip, b.strategy) == (1.0, (-1.0, 1.0), "megatron") and not str(b.path).startswith("~")


def test_the_short_form_adds_a_model() -> None:
    assert reward_models(reward()) == {} == reward_models(reward("reward.reward_model.path=x"))
    for words in (
        ("reward.reward_model.enable=true", "reward.reward_model.model_path=x"),
        ("reward_model.enable=True", "reward_model.model.path=x", "reward_model.micro_batch_size_per_gpu=4"),
    ):
        config = reward(*words, "reward.models.a.path=y")
        models = reward_models(config)
        assert {name: model.path for name, model in models.items()} == {"reward_model": "x", "a": "y"}
        assert model_key("reward_model", config) == "reward.reward_model"
    assert models["reward_model"].forward_micro_batch_size_per_gpu == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.models.a.pth=x"], "reward.models.a.pth: there is no such key; did you mean path?"),
        (["reward.models.a.fsdp_config.dtyp=x"], "reward.models.a.fsdp_config.dtyp: there is no such key; did you mean fsdp_c"),
        (["reward.models.a={path: x, clip: 3}"], "reward.models.a.clip=3: must be a list or null"),
        (["reward.models.a.weight=1"], "reward.models.a.path is null: set the model"),
        (["reward.reward_model.enable=true"], "reward.reward_model.path is null: set the model"),
        (
            ["reward.models={acc: {path: x}}"],
            "reward.models.acc: names consist of letters, digits and _, start with a letter, and must not be one of acc",
        ),
        (["reward.models={a/b: {path: x}}"], "reward.models.a/b: names consist of letters"),
        (
            ["reward.models.reward_model.path=x", "reward.reward_model.enable=true", "reward.reward_model.path=y"],
            "reward.models.reward_model: reward.reward_model.enable=true already defines a model with this name; use another one",
        ),
    ],
)
def test_an_error_names_the_typed_key(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward_models(reward(*words))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_each_wrong_entry_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        reward_models(reward("reward.models={a: {weight: 1}, b: {path: x, kind: y}}"))
    first, second = str(caught.value).splitlines()
    assert first.startswith("reward.models.a.path") and second.startswith('reward.models.b.kind="y": must be one of sequence')
