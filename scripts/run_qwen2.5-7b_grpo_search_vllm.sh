#!/usr/bin/env bash
# Search-R1 (Jin et al. 2025, arXiv:2503.09516) with GRPO: questions of NQ and HotpotQA, three passages a query. Batch, mini-batch, group, KL,
# learning rate, warm-up, turns, lengths and steps are those of its authors' script: https://github.com/PeterGriffinJin/Search-R1 at a14dc3a,
# scripts/nq_hotpotqa/v0.2/train_grpo.sh. Unlike there, the model is Qwen2.5-7B-Instruct, whose template has tool calls; queries are tool calls,
# and not text between tags. 8 GPUs of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
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
  data.max_response_length=3572 # with the prompt 4,096 before the last turn, which has 500
  data.filter_overlong_prompts=true
  reward.custom_reward_function.path="$root/examples/reward_search_r1.py"

  $turns.enable=true
  $turns.max_assistant_turns=5 # four queries and an answer
  $turns.max_tool_response_length=2000 # characters: about 500 tokens, Search-R1's limit
  $turns.tool_response_truncate_side=right # the best passage comes first
  $turns.tool_config_path="$root/examples/tools/search.yaml"

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; actor, its optimizer and the reference keep 15

  trainer.project_name=search_r1
  trainer.experiment_name=qwen2.5-7b_grpo_search
  trainer.total_training_steps=1005
  trainer.test_freq=100
  trainer.save_freq=100
  trainer.max_actor_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
