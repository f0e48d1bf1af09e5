"""Activation offload and tiled MLPs: supported engines and required keys."""

import pytest

from tests.configs.validation.test_programs import ACTOR, ppo_lines, sft_lines

MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.strategy=megatron"


@pytest.mark.parametrize("option", ["enable_activation_offload", "tiled_mlp.enabled"])
def test_activation_options_are_refused_on_megatron(option: str) -> None:
    asked = f"{MODEL}.{option}=true"
    assert ppo_lines(asked, needs_values=False) == []
    (line,) = ppo_lines(asked, MEGATRON, needs_values=False)
    assert line.startswith(f"error: {asked}: not supported by strategy=megatron; use strategy=fsdp")
    (line,) = (line for line in ppo_lines(f"critic.model.{option}=true", MEGATRON, needs_values=True) if "critic.model" in line)
    assert line.startswith(f"error: critic.model.{option}=true: not supported by strategy=megatron")
    apart = (f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.strategy=megatron")  # the reference has the actor's model
    (line,) = ppo_lines(asked, *apart, needs_values=False)
    assert line.startswith(f"error: {asked}: not supported by strategy=megatron")
    (line,) = ppo_lines(asked, *apart, MEGATRON, needs_values=False)
    (line,) = sft_lines(f"model.{option}=true", "engine.strategy=megatron")
    assert line.startswith(f"error: model.{option}=true: not supported by strategy=megatron")


def test_activation_offload_requires_gradient_checkpointing() -> None:
    (line,) = ppo_lines(
        f"{MODEL}.enable_activation_offload=true", f"{MODEL}.enable_gradient_checkpointing=false", needs_values=False
    )
    assert line.startswith(f"error: {MODEL}.enable_activation_offload=true: {MODEL}.enable_gradient_checkpointing=false")
    assert ppo_lines(f"{MODEL}.enable_gradient_checkpointing=false", needs_values=False) == []
