"""LoRA: unsupported combinations, and keys without effect."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig
from configs.validation.programs import check_generation, check_parity, check_ppo, check_sft

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
UNREAD = "with a LoRA adapter the reference is the actor with its adapter disabled"
CHECKS = {
    "ppo_trainer": (PPOConfig, lambda config, typed: check_ppo(config, typed, needs_values=True)),
    "sft_trainer": (SFTConfig, check_sft),
    "generation": (GenerationConfig, check_generation),
    "parity": (ParityConfig, check_parity),
}


def lines(root: str, *overrides: str) -> list[str]:
    schema, check = CHECKS[root]
    typed = {word.partition("=")[0] for word in overrides}
    try:
        return [line for line in check(compose(root, schema, list(overrides)), typed) if "lora" in line.lower()]
    except ConfigError as error:
        return str(error).splitlines()


@pytest.mark.parametrize(
    ("root", "overrides", "expected"),
    [
        ("ppo_trainer", [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]"], []),
        ("sft_trainer", ["model.lora_rank=8"], []),
        (
            "ppo_trainer",
            [f"{MODEL}.lora_rank=8", "actor_rollout_ref.actor.strategy=megatron", "critic.strategy=fsdp"],
            [f"{MODEL}.lora_rank=8: the Megatron engine does not support LoRA; use strategy=fsdp, or remove the key"],
        ),
        (
            "ppo_trainer",
            ["critic.model.lora_adapter_path=there", "critic.strategy=megatron"],
            [
                "critic.model.lora_adapter_path=there: the Megatron engine does not support LoRA; use strategy=fsdp, "
                "or remove the key"
            ],
        ),
        (
            "sft_trainer",
            ["model.lora_rank=2", "engine.strategy=megatron"],
            ["model.lora_rank=2: the Megatron engine does not support LoRA; use strategy=fsdp, or remove the key"],
        ),
        (
            "parity",
            [f"{MODEL}.lora_rank=2", "actor_rollout_ref.actor.strategy=megatron"],
            [f"{MODEL}.lora_rank=2: the Megatron engine does not support LoRA; use strategy=fsdp, or remove the key"],
        ),
        (
            "ppo_trainer",
            ["rollout=embedded", f"{MODEL}.lora_rank=2", f"{ROLLOUT}.lora_sync=adapter"],
            [f"{ROLLOUT}.lora_sync=adapter: the embedded engine only accepts full weights; use merged"],
        ),
        (
            "generation",
            ["rollout=embedded", f"{MODEL}.lora_adapter_path=a", f"{ROLLOUT}.lora_sync=adapter"],
            [f"{ROLLOUT}.lora_sync=adapter: the embedded engine only accepts full weights; use merged"],
        ),
        ("ppo_trainer", [f"{MODEL}.lora_rank=2", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.lora_sync=adapter"], []),
        (
            "ppo_trainer",
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.lora_sync=adapter", "critic.model.lora_alpha=3"],
            [
                "critic.model.lora_alpha has no effect: critic.model.lora_rank=0 trains all parameters",
                f"{ROLLOUT}.lora_sync=adapter has no effect: the model has no LoRA adapter",
            ],
        ),
        (
            "ppo_trainer",
            [f"{MODEL}.lora_adapter_path=a", f"{MODEL}.target_modules=[q_proj]", "actor_rollout_ref.actor.use_kl_loss=true"],
            [
                f"{MODEL}.target_modules has no effect: the adapter in {MODEL}.lora_adapter_path defines it",
                f"the reference is {MODEL}.path without the adapter of lora_adapter_path",
            ],
        ),
        (
            "ppo_trainer",
            [
                f"{MODEL}.lora_rank=2",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.ref.strategy=fsdp",
                "actor_rollout_ref.ref.fsdp_config.param_offload=true",
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
            ],
            [
                "actor_rollout_ref.ref.fsdp_config.param_offload has no effect: " + UNREAD,
                "actor_rollout_ref.ref.strategy has no effect: " + UNREAD,
            ],
        ),
        ("ppo_trainer", ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.strategy=fsdp"], []),
    ],
)  # fmt: skip
def test_keys_of_an_adapter_give_these_errors_and_notes(root: str, overrides: list[str], expected: list[str]) -> None:
    assert lines(root, *overrides) == expected


def test_an_alpha_of_zero_is_refused() -> None:
    config = compose("ppo_trainer", PPOConfig, ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=0"])
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref.model.lora_alpha=0: .* set it to lora_rank or twice lora_rank$"):
        check_ppo(config, (), needs_values=True)
