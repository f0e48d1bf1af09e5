#!/usr/bin/env bash
# REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): less the mean of the prompt's responses, then whitened over the tokens of the
# whole batch; PPO's clipped loss, and the KL to the reference in it as k2. Batch, group, KL and learning rate are those of OpenRLHF's
# script for it. Qwen2.5-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math # data, validation, checkpoints
  algorithm.adv_estimator=reinforce_plus_plus_baseline
  actor_rollout_ref.actor.use_kl_loss=true # times 0.001
  actor_rollout_ref.actor.kl_loss_type=mse # k2: its gradient is that of the KL
  actor_rollout_ref.actor.optim.lr=5e-7
  actor_rollout_ref.rollout.n=8
  data.train_batch_size=128
  actor_rollout_ref.actor.ppo_mini_batch_size=16 # 128 responses per update

  data.max_response_length=2048

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.experiment_name=qwen2.5-7b_reinforce_plus_plus_baseline
  trainer.total_epochs=3 # 116 steps each
  trainer.test_freq=20
  trainer.save_freq=50
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
