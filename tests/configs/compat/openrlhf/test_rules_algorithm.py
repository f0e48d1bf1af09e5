"""Translation of OpenRLHF's flags of algorithm and rewards."""

import pytest

from configs.base.keys import ConfigError
from tests.configs.compat.openrlhf.commands import PPO, comment, settings, translated

ACTOR = "actor_rollout_ref.actor"
KL = "algorithm.kl_ctrl"


def chosen(line: str, beginning: str) -> dict[str, str]:
    """Settings of a translation below a key."""
    return {key.removeprefix(f"{beginning}."): value for key, value in settings(line).items() if key.startswith(beginning)}


def test_kl_coefficient_sets_the_kl_in_the_reward() -> None:
    found = settings(PPO + "--init_kl_coef 0.05 --kl_estimator k2")
    assert found["algorithm.use_kl_in_reward"] == "true" and found["algorithm.kl_penalty"] == "k2"
    assert found[f"{KL}.kl_coef"] == "0.05" and f"{KL}.type" not in found and f"{ACTOR}.use_kl_loss" not in found
    adaptive = chosen(PPO + "--kl_target 6 --kl_horizon 500", KL)
    assert adaptive == {"kl_coef": "0.01", "type": "adaptive", "target_kl": "6", "horizon": "500"}
    assert comment(PPO + "--kl_horizon 500", "--kl_horizon").endswith("no counterpart: it belongs to kl_target")


def test_use_kl_loss_sets_the_kl_in_the_loss() -> None:
    found = settings(PPO + "--use_kl_loss --use_kl_estimator_k3 --init_kl_coef 1e-3 --kl_target 6")
    assert found[f"{ACTOR}.use_kl_loss"] == "true" and found[f"{ACTOR}.kl_loss_coef"] == "1e-3"
    assert found[f"{ACTOR}.kl_loss_type"] == "k3" and "algorithm.use_kl_in_reward" not in found and f"{KL}.type" not in found


def test_zero_kl_coefficient_sets_no_reference() -> None:
    found = settings(PPO + "--init_kl_coef 0 --micro_rollout_batch_size 4")
    assert not any("kl" in key or key.startswith("actor_rollout_ref.ref.") for key in found)


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("", "rm"),
        ("--critic_pretrain value", "value"),
        ("--reward_pretrain a,b", "a"),
        ("--remote_rm_url http://127.0.0.1:5000/get_reward", "sft"),
        ("--advantage_estimator rloo --n_samples_per_prompt 4", None),
    ],
)
def test_critic_starts_from_the_flags_model(flags: str, path: str | None) -> None:
    found = chosen(PPO + flags, "critic")
    assert found.get("model.path") == path
    assert bool(found) == (path is not None)


def test_reward_models_are_named_and_clipped() -> None:
    one = chosen(PPO + "--normalize_reward", "reward")
    assert one == {
        "scorer": "none",
        "models.rm.path": "rm",
        "models.rm.normalize": "stored",
        "reward_model.forward_micro_batch_size_per_gpu": "8",
        "reward_model.fsdp_config.ulysses_sequence_parallel_size": "1",  # else it would follow the actor's
        "shaping.clip": "[-10,10]",
    }
    two = chosen(PPO + "--reward_pretrain a,b --reward_clip_range -5 5", "reward")
    assert (two["models.rm_1.path"], two["models.rm_2.path"], two["shaping.clip"]) == ("a", "b", "[-5,5]")


def test_reward_servers_replace_reward_models() -> None:
    line = PPO + "--remote_rm_url http://127.0.0.1:5000/a,http://127.0.0.1:5001/a --normalize_reward"
    found = chosen(line, "reward")
    assert found == {"remote_urls": "[http://127.0.0.1:5000/a,http://127.0.0.1:5001/a]", "shaping.clip": "[-10,10]"}
    assert comment(line, "--normalize_reward").startswith("# --reward_pretrain rm, --normalize_reward: implied: --remote_rm_url ")


def test_a_reward_function_has_no_counterpart() -> None:
    line = PPO + "--remote_rm_url mine.py"
    assert "no counterpart" in comment(line, "--remote_rm_url mine.py")
    assert "reward.remote_urls" not in settings(line) and "reward.scorer" not in settings(line)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", {"rollout_is": "token", "rollout_is_threshold": "2"}),
        ("--vllm_is_truncated_threshold 0.5 3", {"rollout_is": "token", "rollout_is_threshold": "3"}),
        ("--use_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        ("--use_icepop --vllm_is_truncated_threshold 0.5 3", {"rollout_is": "token", "rollout_is_threshold": "0.5_3"}),
        (
            "--vllm_is_correction_type seq-mask-tis --vllm_is_truncated_threshold 0.5 5",
            {
                "rollout_is": "token",
                "rollout_is_threshold": "1000000",
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.2_2",  # of the inverse ratio
            },
        ),
    ],
)
def test_is_correction_sets_rollout_correction(flags: str, wanted: dict[str, str]) -> None:
    assert chosen(f"{PPO} --enable_vllm_is_correction {flags}", "algorithm.rollout_correction") == wanted
    assert chosen(PPO + flags, "algorithm.rollout_correction") == {}


@pytest.mark.parametrize("kind", ["icepop", "seq-mask-tis"])
def test_a_correction_that_excludes_needs_two_bounds(kind: str) -> None:
    """A single bound would truncate weights, which is another algorithm."""
    line = f"{PPO} --enable_vllm_is_correction --vllm_is_correction_type {kind}"
    with pytest.raises(ConfigError, match=rf"--vllm_is_truncated_threshold 2: {kind} needs two bounds, for example 0.5 5.0"):
        settings(f"{line} --vllm_is_truncated_threshold 2")
    assert "0.5_5.0" in chosen(line, "algorithm.rollout_correction").values() or kind == "seq-mask-tis"


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("reinforce", "reinforce_plus_plus"),
        ("reinforce_baseline", "reinforce_plus_plus_baseline"),
        ("rloo", "rloo"),
        ("group_norm", "grpo"),
    ],
)
def test_advantage_estimators_are_renamed(estimator: str, expected: str) -> None:
    assert settings(f"{PPO} --advantage_estimator {estimator}")["algorithm.adv_estimator"] == expected


def test_dr_grpo_disables_division_and_unknown_estimators_are_refused() -> None:
    assert settings(PPO + "--advantage_estimator dr_grpo")["algorithm.norm_adv_by_std_in_grpo"] == "false"
    with pytest.raises(ConfigError, match=r"^--advantage_estimator a2c: is none of gae, reinforce, "):
        translated(PPO + "--advantage_estimator a2c")


def test_options_without_their_main_flag_have_no_counterpart() -> None:
    for flag, other in (
        ("--overlong_penalty_factor 1", "overlong_buffer_len"),
        ("--dynamic_filtering_reward_range 0 1", "dynamic_filtering"),
        ("--vllm_is_correction_type tis", "enable_vllm_is_correction"),
        ("--ema_beta 0.9", "enable_ema"),
        ("--ptx_coef 0.1", "pretrain_data"),
    ):
        assert comment(PPO + flag, flag).endswith(f"no counterpart: it belongs to {other}")


def test_filtering_overlong_penalty_ema_and_warmup_are_translated() -> None:
    filtered = settings(PPO + "--dynamic_filtering --vllm_generate_batch_size 2048")
    assert filtered["algorithm.filter_groups.enable"] == "true" and filtered["data.gen_batch_size"] == "2048"
    overlong = chosen(PPO + "--overlong_buffer_len 256 --overlong_penalty_factor 0.5", "reward.reward_kwargs.overlong_buffer_cfg")
    assert overlong == {"enable": "true", "len": "256", "penalty_factor": "0.5"}
    assert settings(PPO + "--enable_ema")[f"{ACTOR}.ema_decay"] == "0.992"
    assert settings(PPO + "--freezing_actor_steps 7")["trainer.critic_warmup"] == "7"
    assert "trainer.critic_warmup" not in settings(PPO)  # -1 there is 0 here
