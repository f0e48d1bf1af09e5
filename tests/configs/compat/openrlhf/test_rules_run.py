"""Translation of OpenRLHF's flags of batches, schedules, engines, loggers and checkpoints."""

import pytest

from configs.base.keys import ConfigError
from tests.configs.compat.openrlhf.commands import PPO, comment, settings, translated

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NEWER = "--actor.model_name_or_path m --reward.model_name_or_path r --data.prompt_dataset p.jsonl "


def test_batch_sizes_in_responses_become_prompts() -> None:
    line = PPO + "--rollout_batch_size 256 --train_batch_size 512 --n_samples_per_prompt 8"
    found = settings(line)
    assert found["data.train_batch_size"] == "256" and found[f"{ROLLOUT}.n"] == "8"
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == "64"  # 512 responses, 8 per prompt
    arithmetic = "256 prompts * 8 responses = 2048, a mini-batch 512 responses / 8 = 64 prompts: 4 optimizer steps per epoch"
    assert arithmetic in comment(line, "--train_batch_size 512")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train_batch_size 100 --n_samples_per_prompt 8", "whole groups of 8 responses here, and 100 / 8 = 12.5"),
        ("--train_batch_size 96 --rollout_batch_size 128", r"\(128 = 1 \* 96 \+ 32\)"),
        ("--train_batch_size 0", "0 / 1 = 0"),
        ("--n_samples_per_prompt 0", "whole groups of 0 responses"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(PPO + flags)


def test_micro_batches_are_sized_by_rows_or_tokens() -> None:
    counted = settings(PPO + "--micro_train_batch_size 2 --micro_rollout_batch_size 16")
    assert counted[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == counted["critic.ppo_micro_batch_size_per_gpu"] == "2"
    forward = ("actor_rollout_ref.ref.log_prob", f"{ROLLOUT}.log_prob", "critic.forward", "reward.reward_model.forward")
    assert {counted[f"{role}_micro_batch_size_per_gpu"] for role in forward} == {"16"}
    line = PPO + "--use_dynamic_batch --train_max_tokens_per_gpu 9000 --micro_train_batch_size 2"
    cut = settings(line)
    assert cut[f"{ACTOR}.use_dynamic_bsz"] == "true" and cut[f"{ACTOR}.ppo_max_token_len_per_gpu"] == "9000"
    assert {cut[f"{role}_max_token_len_per_gpu"] for role in forward} == {"9000"}
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu" not in cut
    assert comment(line, "--micro_train_batch_size").endswith("implied: micro-batches are sized by tokens")


@pytest.mark.parametrize(
    ("shape", "kind", "rest"),
    [
        ("cosine_with_min_lr", "cosine", {"min_lr_ratio": "0.1"}),
        ("cosine", "cosine", {"min_lr_ratio": "0.0"}),
        ("constant_with_warmup", "constant", {}),
        ("constant", "constant", {"lr_warmup_steps": "0"}),
        ("linear", "linear", {"min_lr_ratio": "0.0"}),
        ("polynomial", "cosine", {"min_lr_ratio": "0.0"}),
    ],
)
def test_lr_schedules_are_renamed(shape: str, kind: str, rest: dict[str, str]) -> None:
    line = f"{PPO} --lr_scheduler {shape}"
    found = settings(line)
    for optim in (f"{ACTOR}.optim", "critic.optim"):
        assert {key: found[f"{optim}.{key}"] for key in ("lr_scheduler_type", *rest)} == {"lr_scheduler_type": kind} | rest
    assert ("no counterpart" in comment(line, "--lr_scheduler")) == (shape == "polynomial")


def test_newer_flags_set_a_schedule_per_model() -> None:
    found = settings(NEWER + "--critic.lr_scheduler constant_with_warmup --actor.min_lr_ratio 0.2")
    assert found[f"{ACTOR}.optim.lr_scheduler_type"] == "cosine" and found[f"{ACTOR}.optim.min_lr_ratio"] == "0.2"
    assert found["critic.optim.lr_scheduler_type"] == "constant"


def test_backend_flags_select_the_rollout_engine() -> None:
    assert settings(PPO)[f"{ROLLOUT}.name"] == "vllm"
    assert settings(PPO + "--backend sglang")[f"{ROLLOUT}.name"] == "sglang"
    assert settings(PPO + "--vllm_num_engines 0")[f"{ROLLOUT}.name"] == "embedded"
    with pytest.raises(ConfigError, match=r"^--backend hf: is none of vllm, sglang$"):
        translated(PPO + "--backend hf")


def test_checkpoint_flags_set_directory_frequency_and_resume_mode() -> None:
    never = settings(PPO)
    assert never["trainer.default_local_dir"] == "./ckpt/checkpoints_ppo_ray" and never["trainer.resume_mode"] == "disable"
    assert "trainer.save_freq" not in never  # the last step alone, the default
    line = PPO + "--save_steps 20 --save_path out --ckpt_path run --load_checkpoint"
    found = settings(line)
    assert (found["trainer.save_freq"], found["trainer.resume_mode"]) == ("20", "auto")
    assert "python -m trainer.main_export checkpoint=run output=out" in comment(line, "--save_path out")
    assert settings("train_sft --pretrain m --dataset d.jsonl --output_key a --save_path out")["trainer.export_dir"] == "out"


def test_logger_flags_set_the_list_of_loggers() -> None:
    assert settings(PPO)["trainer.logger"] == "[console]"
    assert settings(PPO + "--use_wandb k --use_tensorboard tb")["trainer.logger"] == "[console,wandb,tensorboard]"


def test_offload_flags_set_the_models_they_name() -> None:
    key = "fsdp_config.param_offload"
    older = settings(PPO + "--ref_reward_offload")
    assert older[f"actor_rollout_ref.ref.{key}"] == older[f"reward.reward_model.{key}"] == "true"
    newer = settings(NEWER + "--ref.offload")
    assert newer[f"actor_rollout_ref.ref.{key}"] == "true" and f"reward.reward_model.{key}" not in newer


@pytest.mark.parametrize(("task", "engine"), [("generate_vllm", "vllm"), ("generate_sglang", "sglang"), ("generate", "embedded")])
def test_task_of_batch_inference_selects_the_engine(task: str, engine: str) -> None:
    found = settings(f"batch_inference --eval_task {task} --pretrain m --dataset d.jsonl --tp_size 2")
    assert found.get(f"{ROLLOUT}.name", "embedded") == engine
    assert found[f"{ROLLOUT}.tensor_model_parallel_size"] == found["trainer.n_gpus_per_node"] == "2"


def test_a_task_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--eval_task rm: has no counterpart; "):
        translated("batch_inference --eval_task rm --pretrain m --dataset d.jsonl")
