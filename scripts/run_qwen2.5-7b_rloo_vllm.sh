#!/usr/bin/env bash
# RLOO (Ahmadian et al. 2024, arXiv:2402.14740): a response's baseline is the mean of the others to its prompt; plain policy gradient of
# whole responses, without ratio or clip, one update per step; the KL to the reference is part of the reward. 4 responses per prompt, the
# better of its values of k.
# Qwen2.5-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math # data, validation, checkpoints
  algorithm.adv_estimator=rloo
  algorithm.use_kl_in_reward=true # times 0.001; the paper's 0.03 goes with a reward model's scores, these are 0 and 1
  actor_rollout_ref.actor.policy_loss.loss_mode=reinforce
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum # a response is one action: its log-prob is the sum of its tokens'
  actor_rollout_ref.rollout.n=4
  data.train_batch_size=512
  actor_rollout_ref.actor.ppo_mini_batch_size=512 # all of them: one update a step

  data.max_response_length=2048

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.experiment_name=qwen2.5-7b_rloo
  trainer.total_epochs=10 # 29 steps each
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
