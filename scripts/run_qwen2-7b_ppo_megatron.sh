#!/usr/bin/env bash
# run_qwen2-7b_ppo_sglang.sh with every model on Megatron (Shoeybi et al. 2019, arXiv:1909.08053): the same data, batch and losses.
# 8 GPUs of 80 GB, Megatron, SGLang. Not run here.
set -euo pipefail

settings=(
  recipe=gsm8k_math_ppo # data, model, PPO with KL in the reward, validation, checkpoints
  data.max_response_length=3072

  # The critic and the reference are split like the actor: four copies of two GPUs each. For its 3.8B parameters a GPU holds 2 bytes
  # each, 4 for the gradient, and a quarter of the optimizer's 12: 34 GB. Two such models and an engine do not fit: idle ones are
  # offloaded to the host.
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.actor.megatron.param_offload=true
  actor_rollout_ref.actor.megatron.grad_offload=true
  actor_rollout_ref.actor.megatron.optimizer_offload=true

  rollout=sglang
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8   # the trainer is on the host

  trainer.experiment_name=qwen2-7b_ppo_megatron
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
