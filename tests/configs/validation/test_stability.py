"""Combinations of stability options (moving average, pretraining loss, penalties, whitening)."""

import pytest

from tests.configs.validation.test_programs import ACTOR, ROLLOUT, ppo_lines

PTX = "data.ptx_files=texts.parquet"
CUT = "reward.missing_eos_penalty=0.5"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [f"{ACTOR}.ema_decay=0.9", f"{ACTOR}.strategy=megatron"],
            f"error: {ACTOR}.ema_decay=0.9: {ACTOR}.strategy=megatron does not support a moving average; use null, "
            "or strategy=fsdp",
        ),
        (
            [f"{ACTOR}.ema_decay=0.9", "actor_rollout_ref.model.lora_rank=8"],
            f"error: {ACTOR}.ema_decay=0.9: a moving average of a LoRA adapter is not supported; use null",
        ),
        (
            [PTX, f"{ROLLOUT}.temperature=0.7"],
            f"error: data.ptx_files: needs {ROLLOUT}.temperature=1, not 0.7: all log-probs of a mini-batch are computed at one "
            "temperature, and the pretraining loss is defined at temperature 1",
        ),
        (
            [PTX, "data.ptx_max_length=20000"],
            "error: data.ptx_max_length=20000: a micro-batch of the actor holds 16384 tokens; "
            f"increase {ACTOR}.ppo_max_token_len_per_gpu",
        ),
        (
            ["algorithm.whiten_advantages=group"],
            "algorithm.whiten_advantages=group: advantages are whitened twice; algorithm.adv_estimator=gae already whitens "
            "over each batch",
        ),
        (
            [*GRPO, "algorithm.whiten_advantages=batch"],
            "algorithm.whiten_advantages=batch: advantages are whitened twice; algorithm.adv_estimator=grpo already whitens "
            "over each group",
        ),
        (["algorithm.kl_clip=1"], "algorithm.kl_clip has no effect: algorithm.use_kl_in_reward=false"),
        (["data.ptx_max_length=8"], "data.ptx_max_length has no effect: data.ptx_files=null"),
        ([f"{ACTOR}.ptx_coef=1"], f"{ACTOR}.ptx_coef has no effect: data.ptx_files=null"),
        (
            [CUT, f"{ROLLOUT}.ignore_eos=true"],
            f"{CUT}: every response is penalized, because none terminates with {ROLLOUT}.ignore_eos=true",
        ),
        (
            [CUT, "algorithm.truncated_answers=mask"],
            f"{CUT}: algorithm.truncated_answers=mask excludes the penalized responses from the loss; the penalty "
            "only affects the baseline of their group",
        ),
        (
            [CUT, "algorithm.truncated_answers=bootstrap"],
            f"{CUT}: algorithm.truncated_answers=bootstrap adds the critic's value at the truncation, as if the "
            "response continued; the penalty is subtracted as well",
        ),
        (
            [CUT, *(f"reward.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("enable=true", "len=8", "penalty_factor=1"))],
            f"{CUT}: a response truncated at reward.reward_kwargs.max_resp_len also gets the overlong penalty, 0.5 + 1 = 1.5",
        ),
    ],
)
def test_a_conflict_of_stability_options_is_one_line(overrides: list[str], line: str) -> None:
    assert ppo_lines(*overrides) == [line]


def test_compatible_stability_options_have_no_errors_or_notes() -> None:
    for overrides in (
        [PTX, f"{ACTOR}.ptx_coef=1", "data.ptx_max_length=16384", f"{ACTOR}.ema_decay=0.99", CUT],
        [PTX, "data.ptx_max_length=20000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"],
        ["algorithm.kl_clip=1", "algorithm.use_kl_in_reward=true", "trainer.critic_warmup=2"],
        [*GRPO, "algorithm.whiten_advantages=batch", "algorithm.norm_adv_by_std_in_grpo=false"],
    ):
        assert ppo_lines(*overrides, needs_values=GRPO[0] not in overrides) == []


def test_critic_warmup_without_a_critic_gives_a_note() -> None:
    lines = ppo_lines("algorithm.adv_estimator=reinforce", "trainer.critic_warmup=2", needs_values=False)
    assert lines == ["trainer.critic_warmup=2: there is no critic, so nothing is trained during these steps"]


@pytest.mark.parametrize("value", ["0", "1", "-0.5", "1.5"])
def test_an_ema_decay_outside_0_and_1_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=rf"{ACTOR}\.ema_decay"):
        ppo_lines(f"{ACTOR}.ema_decay={value}")
