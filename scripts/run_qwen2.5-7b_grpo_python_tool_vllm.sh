#!/usr/bin/env bash
# A code interpreter in mathematics, as in ReTool (Feng et al. 2025, arXiv:2504.11536): GRPO with clip-higher, without KL; programs run in the
# sandbox of code rewards. From Qwen2.5-7B-Instruct without the fine-tuning on traces that ReTool begins with. GSM8K and MATH.
# 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

turns=actor_rollout_ref.rollout.multi_turn
settings=(
  recipe=gsm8k_math # data, validation, checkpoints
  algorithm.adv_estimator=grpo
  actor_rollout_ref.actor.clip_ratio_high=0.28 # the lower bound stays 0.2
  data.train_batch_size=128
  actor_rollout_ref.actor.ppo_mini_batch_size=32 # four updates a step
  actor_rollout_ref.rollout.n=16
  data.max_response_length=6144 # all turns and results

  $turns.enable=true
  $turns.max_assistant_turns=8
  $turns.max_tool_response_length=1024 # characters; tracebacks are long
  $turns.tool_config_path="$(dirname "${BASH_SOURCE[0]}")/../examples/tools/python.yaml"
  actor_rollout_ref.rollout.agent.num_workers=8 # 32 programs at the same time

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; the actor and its optimizer keep 11

  trainer.experiment_name=qwen2.5-7b_python_tool
  trainer.total_epochs=5 # 116 steps each
  trainer.test_freq=20
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
