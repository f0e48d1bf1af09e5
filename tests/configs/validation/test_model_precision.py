import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from trainer import main_dpo, main_ppo, main_reward_model, main_sft

ACTOR, REF, CRITIC, JUDGE = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward.reward_model"
USE = "small gradients underflow to 0, and there is no loss scaling; use bfloat16, or float32 on GPUs without bfloat16"


def check_ppo(*words: str) -> None:
    config = compose("ppo_trainer", PPOConfig, [*words, "data.train_batch_size=1024"])
    main_ppo.PROGRAM.check(config, frozenset())


@pytest.mark.parametrize(
    ("role", "words"),
    [
        (ACTOR, ["algorithm=grpo"]),
        (CRITIC, ["algorithm=ppo"]),
        (ACTOR, ["algorithm=ppo", f"{ACTOR}.fsdp_config.model_dtype=float16"]),
    ],
)
def test_trained_models_in_float16_are_refused(role: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{role}\.fsdp_config\.dtype=float16: {USE}"):
        check_ppo(*words, f"{role}.fsdp_config.dtype=fp16")


def test_trained_parameters_in_float16_are_refused_unless_frozen_by_lora() -> None:
    kept = f"{ACTOR}.fsdp_config.model_dtype=float16"
    with pytest.raises(ConfigError, match=rf"{ACTOR}\.fsdp_config\.model_dtype=float16: {USE}"):
        check_ppo("algorithm=grpo", kept)
    check_ppo("algorithm=grpo", kept, "actor_rollout_ref.model.lora_rank=8")  # the frozen base is in float16


def test_frozen_models_in_float16_are_accepted() -> None:
    frozen = (f"{REF}.fsdp_config.dtype=float16", f"{JUDGE}.fsdp_config.dtype=float16", "actor_rollout_ref.rollout.dtype=float16")
    check_ppo("algorithm=grpo", *frozen, f"{ACTOR}.use_kl_loss=true", f"{CRITIC}.fsdp_config.dtype=float16")


def test_supervised_training_in_float16_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"engine\.fsdp_config\.dtype=float16: {USE}"):
        main_sft.PROGRAM.check(compose("sft_trainer", SFTConfig, ["engine.fsdp_config.dtype=float16"]), frozenset())
    of_rewards = compose("reward_model_trainer", RewardModelConfig, ["engine.fsdp_config.dtype=float16"])
    with pytest.raises(ConfigError, match=rf"engine\.fsdp_config\.dtype=float16: {USE}"):
        main_reward_model.PROGRAM.check(of_rewards, frozenset())
    of_policy = compose("dpo_trainer", DPOConfig, ["engine.fsdp_config.dtype=float16"])
    with pytest.raises(ConfigError, match=rf"engine\.fsdp_config\.dtype=float16: {USE}"):
        main_dpo.PROGRAM.check(of_policy, frozenset())
