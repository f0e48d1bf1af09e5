#!/usr/bin/env bash
# GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per response, the mean over its tokens in logarithms, and so a range hundreds of
# times narrower than PPO's. Range and four updates a step are its section 5.1's; group and batch are verl's for it.
# Qwen2.5-7B, the base model, on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math # data, validation, checkpoints
  algorithm.adv_estimator=grpo # its eq. 6; no KL
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo
  actor_rollout_ref.actor.clip_ratio_low=3e-4
  actor_rollout_ref.actor.clip_ratio_high=4e-4
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean # its eq. 5 is a mean over responses
  actor_rollout_ref.rollout.n=16
  data.train_batch_size=512
  actor_rollout_ref.actor.ppo_mini_batch_size=128 # four updates a step

  data.max_response_length=4096

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.75 # of 80 GB; the actor and its optimizer keep 11

  trainer.experiment_name=qwen2.5-7b_gspo
  trainer.total_epochs=10 # 29 steps each
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
