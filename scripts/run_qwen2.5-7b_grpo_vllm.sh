#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) with the numbers of its section 4.2: 64 responses to each of 16 prompts, one update on them,
# learning rate 1e-6, KL 0.04. Qwen2.5-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math # data (935 steps), validation, checkpoints
  algorithm=grpo # the KL to the reference is part of the loss
  actor_rollout_ref.actor.kl_loss_coef=0.04
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean # eq. 3: responses count equally, whatever their length
  data.train_batch_size=16
  actor_rollout_ref.actor.ppo_mini_batch_size=16 # all of them: one update a step
  actor_rollout_ref.rollout.n=64
  data.max_response_length=1024

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7   # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.experiment_name=qwen2.5-7b_grpo
  trainer.total_epochs=1
  trainer.test_freq=50
  trainer.save_freq=100
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
