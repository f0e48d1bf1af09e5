#!/usr/bin/env bash
# Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without the two divisions that favour easy questions and long wrong responses, without KL.
# Numbers are those of its authors' script for Qwen2.5-Math-1.5B, the base model, on MATH. 8 GPUs of 40 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  algorithm.adv_estimator=grpo
  algorithm.norm_adv_by_std_in_grpo=false
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm # sums, over one and the same length
  actor_rollout_ref.rollout.n=8
  data.train_batch_size=128
  actor_rollout_ref.actor.ppo_mini_batch_size=16 # 128 responses per update

  data.train_files="$data/math/train.parquet" # 7,500 prompts: 58 steps an epoch
  data.val_files="$data/math/test.parquet"
  data.max_prompt_length=1024
  data.max_response_length=3000 # the model knows 4,096 positions
  data.filter_overlong_prompts=true

  actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-1.5B

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 # of 40 GB; the actor and its optimizer keep 2

  trainer.project_name=math
  trainer.experiment_name=qwen2.5-math-1.5b_dr_grpo
  trainer.total_epochs=20
  trainer.test_freq=20
  trainer.save_freq=100
  trainer.max_actor_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
