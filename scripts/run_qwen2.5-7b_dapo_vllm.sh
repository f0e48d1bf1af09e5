#!/usr/bin/env bash
# DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, loss by tokens (the default), soft overlong punishment, no KL.
# Batch, group, updates and learning rate are its section 4.1's; responses are a quarter as long, as GSM8K and MATH are easier than its
# data. Qwen2.5-7B, the base model. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math # data, validation, checkpoints
  algorithm.adv_estimator=grpo
  actor_rollout_ref.actor.clip_ratio_high=0.28 # the lower bound stays 0.2
  algorithm.filter_groups.enable=true # groups that are all right or all wrong are replaced
  algorithm.filter_groups.max_num_gen_batches=10 # then the data is too easy, or too hard, and the run says so
  data.gen_batch_size=1536 # prompts a round: a third of the groups have to be kept for one round to do
  data.train_batch_size=512
  actor_rollout_ref.rollout.n=16
  actor_rollout_ref.actor.ppo_mini_batch_size=32 # 16 updates a step
  actor_rollout_ref.actor.optim.lr_warmup_steps=320 # 20 steps of 16 updates
  reward.reward_kwargs.overlong_buffer_cfg.enable=true
  reward.reward_kwargs.overlong_buffer_cfg.len=1024 # the last fifth of the length, as there
  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 # half of what lies between right and wrong: here 0 and 1, there -1 and 1

  data.max_response_length=5120

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.75 # of 80 GB; the actor and its optimizer keep 11

  trainer.experiment_name=qwen2.5-7b_dapo
  trainer.total_epochs=10 # 29 steps each
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
