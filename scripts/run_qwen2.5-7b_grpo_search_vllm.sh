#!/usr/bin/env bash
# Search-R1 (Jin et al. 2025, arXiv:2503.09516) with GRPO: questions of NQ and HotpotQA, three passages a query. Batch, group and KL follow the
# paper as far as known and were not compared with it. Qwen2.5-7B-Instruct. 8 GPUs of 80 GB, FSDP, vLLM. Not run on GPUs yet.
# Needs Search-R1's retrieval server (examples/tools/search.yaml has its address), and the parquet files that verl's
# preprocess_search_r1_dataset.py writes, in $DATA/searchR1_processed_direct.
set -euo pipefail

data=${DATA:-$HOME/data}
root=$(dirname "${BASH_SOURCE[0]}")/..
turns=actor_rollout_ref.rollout.multi_turn
settings=(
  algorithm=grpo
  data.train_files="$data/searchR1_processed_direct/train.parquet"
  data.val_files="$data/searchR1_processed_direct/test.parquet"
  data.train_batch_size=512 # two updates a step
  actor_rollout_ref.rollout.n=5
  data.max_prompt_length=1024
  data.max_response_length=3072 # all turns and passages: 4,096 with the prompt
  data.filter_overlong_prompts=true
  reward.custom_reward_function.path="$root/examples/reward_search_r1.py"

  $turns.enable=true
  $turns.max_assistant_turns=4
  $turns.max_tool_response_length=2000 # characters: about 500 tokens
  $turns.tool_response_truncate_side=right # the best passage comes first
  $turns.tool_config_path="$root/examples/tools/search.yaml"

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.project_name=search_r1
  trainer.experiment_name=qwen2.5-7b_grpo
  trainer.total_training_steps=500
  trainer.test_freq=50
  trainer.save_freq=100
  trainer.max_actor_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
