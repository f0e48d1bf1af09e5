#!/usr/bin/env bash
# PPO (arXiv:1707.06347) with long responses: trainer and engine take turns on the same GPUs, and each has nearly all of their memory.
# While vLLM generates, actor, critic and reference are on the host; while they learn, vLLM sleeps (rollout.free_cache_engine, on by default).
# Qwen2-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, vLLM; 200 GB of the host's memory. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

settings=(
  recipe=gsm8k_math_ppo # data, model, PPO with KL in the reward, validation, checkpoints
  data.max_response_length=7168

  actor_rollout_ref.actor.fsdp_config.param_offload=true # 3.8 GB a GPU, over the bus twice a step
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true # 7.6
  actor_rollout_ref.ref.fsdp_config.param_offload=true
  critic.fsdp_config.param_offload=true
  critic.fsdp_config.optimizer_offload=true

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85 # of 80 GB: 15 for weights, some 55 for a cache of 900,000 tokens

  trainer.experiment_name=qwen2-7b_ppo_vllm_sleep
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
