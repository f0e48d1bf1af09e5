"""Whole translations: bash parses them, and Tandem's programs accept them."""

import shlex

import pytest

from configs.argv import normalise
from configs.base.keys import ConfigError
from configs.compat.openrlhf.script import script
from configs.compat.openrlhf.table import Flag, FlagSource, Table
from configs.compose import run_jobs
from configs.schema.ppo import PPOConfig
from tests.configs.compat.openrlhf.commands import PPO, PUBLIC, argv, comment, dry_run, settings, translated

NEWER = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 "
    "--train.colocate_all --algo.advantage.estimator group_norm --actor.model_name_or_path sft --train.dynamic_batch_enable "
    "--reward.remote_url http://127.0.0.1:5000/get_reward --train.batch_size 1024 --rollout.batch_size 128 --ds.zero_stage 3 "
    "--rollout.n_samples_per_prompt 8 --data.max_len 9216 --rollout.max_new_tokens 8192 --actor.adam.lr 5e-7 --vllm.enable_sleep "
    "--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 --data.prompt_dataset prompts.jsonl --ds.enable_sleep "
    "--data.input_key prompt --algo.dynamic_filtering_enable --actor.eps_clip_low_high 0.2 0.28 --eval.dataset aime.jsonl "
    "--eval.steps 5 --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --logger.wandb.key secret"
)
RARE = (
    PPO + "--kl_target 6 --overlong_buffer_len 256 --enable_ema --pretrain_data texts.jsonl --enable_vllm_is_correction "
    "--vllm_is_correction_type seq-mask-tis --vllm_is_truncated_threshold 0.9 1.1 --reward_pretrain a,b --normalize_reward "
    "--freezing_actor_steps 5 --deepspeed_enable_sleep --ref_reward_offload --full_determinism --entropy_loss_coef 0 "
    "--dual_clip 5 --use_tensorboard tb --param_dtype fp16 --ring_attn_size 2 --lr_scheduler constant "
    "--value_clip 0.2 --aux_loss_coef 0.01"
)
SFT = (
    "deepspeed --module openrlhf.cli.train_sft --max_len 4096 --dataset Open-Orca/OpenOrca --input_key question --output_key "
    "response --train_batch_size 256 --micro_train_batch_size 2 --pretrain base --save_path sft --zero_stage 2 --max_epochs 1 "
    "--packing_samples --bf16 --learning_rate 5e-6 --lora_rank 8 --target_modules q_proj k_proj --adam_betas 0.9 0.98"
)
CHAT = "train_sft --model.model_name_or_path base --data.dataset chat.parquet --data.input_key messages --data.multiturn"
RM = (
    "deepspeed --module openrlhf.cli.train_rm --pretrain base --dataset pairs.jsonl --apply_chat_template --max_len 8192 "
    "--zero_stage 3 --save_path rm --margin_loss --loss sigmoid --train_batch_size 256 --eval_dataset held.jsonl --eval_steps 20"
)
DPO = (
    "deepspeed --module openrlhf.cli.train_dpo --save_path dpo --train_batch_size 256 --micro_train_batch_size 1 --pretrain sft "
    "--ref_pretrain sft --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 5e-7 --beta 0.05 --eval_steps 20 "
    "--dataset pairs.jsonl --apply_chat_template --prompt_key question --chosen_key best --rejected_key worst --ref_offload "
    "--nll_loss_coef 0.2 --label_smoothing 0.1 --gradient_checkpointing --eval_dataset held.jsonl"
)
IPO = (
    "train_dpo --model.model_name_or_path sft --data.dataset pairs.jsonl --model.ipo_enable --adam.lr 1e-6 --ckpt.output_dir dpo"
)
ANSWERS = "batch_inference --eval_task generate_sglang --pretrain sft --dataset d.jsonl --output_path answers --greedy_sampling"


@pytest.mark.parametrize("line", [*PUBLIC, NEWER, RARE, SFT, CHAT, RM, DPO, IPO, ANSWERS])
def test_translation_passes_the_programs_checks_and_explains_every_flag(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = translated(line)
    assert dry_run(text) == 0
    out, err = capsys.readouterr()
    assert out.startswith("configuration is fine: ") and "has no effect" not in err
    commented = text[: text.index("\npython -m ")].splitlines()
    assert all(one.startswith("#") for one in commented)
    text = " ".join(commented)
    assert [flag for flag in line.split() if flag.startswith("--") and flag not in ("--module",) and flag not in text] == []


def test_list_of_public_command_lines_is_complete() -> None:
    assert len(PUBLIC) == 13 and {line.split()[0] for line in PUBLIC} == {
        "openrlhf.cli.train_ppo_ray",
        "openrlhf.cli.batch_inference",
    }


def test_comments_explain_mapped_implied_and_unsupported_flags() -> None:
    assert comment(PPO + "--top_p 0.9", "--top_p") == "# --top_p 0.9: mapped: actor_rollout_ref.rollout.top_p=0.9"
    assert comment(PPO + "--bf16", "--bf16") == "# --bf16: implied: the compute dtype is bfloat16"
    assert comment(PPO + "--async_train", "--async_train").startswith("# --async_train: no counterpart: ")
    line = comment(PPO + "--critic_learning_rate 1e-5 --advantage_estimator reinforce", "--critic_learning_rate")
    assert line == "# --critic_learning_rate 1e-5: no use: --advantage_estimator reinforce has no critic"


def test_different_defaults_are_written() -> None:
    text = translated(PPO)
    _, defaults = text.split("# OpenRLHF's defaults for absent flags, where they differ from the defaults here:\n")
    assert "# --adam_betas 0.9 0.95: actor_rollout_ref.actor.optim.betas=[0.9,0.95] critic.optim.betas=[0.9,0.95]\n" in defaults
    assert "# without --enable_prefix_caching: actor_rollout_ref.rollout.enable_prefix_caching=false\n" in defaults
    found = settings(PPO)
    assert found["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"] == "0.03"
    assert found["data.prompt_key"] == "input" and found["trainer.seed"] == "42"
    assert "actor_rollout_ref.actor.clip_ratio" not in found  # 0.2 in both
    assert settings(PPO + "--eps_clip 0.2")["actor_rollout_ref.actor.clip_ratio"] == "0.2"  # typed flags are always written


def test_values_with_special_characters_survive_bash_and_hydra() -> None:
    odd = [
        "a b",
        "a\nb",
        "it's",
        "a$HOME",
        "`id`",
        "$(id)",
        "a,b=c",
        "back\\",
        "a#b",
        "na\u00efve",
        "a\u2028b",
        "[x]",
        "'",
        "\\'",
    ]
    text = translated(f"{PPO} --lora_rank 8 --target_modules {shlex.join(odd)}")
    comments = text[: text.index("\npython -m ")].split("\n")
    assert all(one.startswith("#") and one.isprintable() for one in comments)
    (word,) = (word for word in argv(text) if word.startswith("actor_rollout_ref.model.target_modules="))
    seen: list[str] = []
    command = normalise([word], PPOConfig, "ppo_trainer")  # as parsed by Hydra
    run_jobs(command, "ppo_trainer", lambda tree, point: seen.extend(tree["actor_rollout_ref"]["model"]["target_modules"]))
    assert seen == odd


def test_typed_flags_override_defaults() -> None:
    flags = {
        "one": Flag(name="one", newer=(), to=("trainer.seed",)),
        "other": Flag(name="other", newer=(), to=("trainer.seed",), default=42),
    }
    source = FlagSource("train_ppo_ray", "trainer.main_sft", "sft_trainer", flags, ())
    table = Table({"train_ppo_ray": source}, {})
    assert argv(script(["--one", "7"], table))[2:] == ["trainer.seed=7"]
    assert argv(script([], table))[2:] == ["trainer.seed=42"]


def test_a_secret_is_hidden() -> None:
    text = translated(PPO + "--use_wandb 0123456789abcdef")
    assert "0123456789abcdef" not in text and "--use_wandb '***'" in text and "WANDB_API_KEY" in text
    assert settings(PPO + "--use_wandb k")["trainer.logger"] == "[console,wandb]"


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        translated(PPO + "--train_batch_size 100 --kl_estimator k7")
    assert sorted(str(caught.value).splitlines()) == [
        "--kl_estimator k7: is none of k1, k2, k3",
        "--train_batch_size 100: 100 responses / 1 per prompt = 100 prompts, but a rollout of 1024 prompts is not a multiple "
        "of that (1024 = 10 * 100 + 24)",
    ]
    with pytest.raises(ConfigError, match=r"trainer.seed=1.5: must be a whole number"):
        translated(PPO + "--seed 1.5")
