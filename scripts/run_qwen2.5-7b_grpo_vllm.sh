#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) with the numbers of its section 4.2: 64 answers to each of 16 prompts, one update on them,
# learning rate 1e-6, KL 0.04. Qwen2.5-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM. Not run here.
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  algorithm=grpo # the KL to the reference is part of the loss
  actor_rollout_ref.actor.kl_loss_coef=0.04
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean # eq. 3: an answer counts as much as another, however long
  data.train_files="['$data/gsm8k/train.parquet','$data/math/train.parquet']" # 14,973 prompts: 935 steps
  data.val_files="['$data/gsm8k/test.parquet','$data/math/test.parquet']"
  data.train_batch_size=16
  actor_rollout_ref.actor.ppo_mini_batch_size=16 # all of them: one update a step
  actor_rollout_ref.rollout.n=64
  data.max_prompt_length=1024
  data.max_response_length=1024
  data.filter_overlong_prompts=true

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 # 15 GB of weights fit a GPU: 8 engines
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7   # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.project_name=gsm8k_math
  trainer.experiment_name=qwen2.5-7b_grpo
  trainer.total_epochs=1
  trainer.test_freq=50
  trainer.save_freq=100
  trainer.max_actor_ckpt_to_keep=1 # 91 GB each
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
