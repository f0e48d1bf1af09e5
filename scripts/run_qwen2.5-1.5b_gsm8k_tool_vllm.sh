#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) with a tool: the model may check its answers before the final one. Qwen2.5-1.5B-Instruct on GSM8K.
# 1 GPU of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
#     python -m data_preprocess.gsm8k    # once, to ~/data/gsm8k: its rows tell the tool the answer
set -euo pipefail

data=${DATA:-$HOME/data}
turns=actor_rollout_ref.rollout.multi_turn
settings=(
  algorithm=grpo
  data.train_files="$data/gsm8k/train.parquet" # 7,473 prompts: 29 steps an epoch
  data.val_files="$data/gsm8k/test.parquet"
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=64 # four updates a step
  actor_rollout_ref.rollout.n=8
  data.max_prompt_length=1024 # with the tool's schema
  data.max_response_length=1024 # all turns and results

  $turns.enable=true
  $turns.max_assistant_turns=5
  $turns.tool_config_path="$(dirname "${BASH_SOURCE[0]}")/../examples/tools/gsm8k.yaml"

  actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1

  trainer.n_gpus_per_node=1
  trainer.project_name=gsm8k
  trainer.experiment_name=qwen2.5-1.5b_tool
  trainer.total_epochs=15
  trainer.test_freq=10
  trainer.save_freq=50
  trainer.max_actor_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
