#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) of a LoRA adapter (Hu et al. 2021, arXiv:2106.09685), which is how 7B is trained on one GPU:
# Qwen2.5-7B-Instruct on GSM8K. 1 GPU of 80 GB, FSDP, vLLM. Only run with fewer tokens: docs/gpu.md.
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  algorithm=grpo # the reference is the model with the adapter off
  actor_rollout_ref.model.lora_rank=32
  actor_rollout_ref.model.lora_alpha=32
  actor_rollout_ref.actor.optim.lr=1e-5 # ten times that of all weights: docs/lora.md
  actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 # of the base, which is frozen; the adapter is float32
  data.train_files="$data/gsm8k/train.parquet" # 7,473 prompts: 29 steps an epoch
  data.val_files="$data/gsm8k/test.parquet"
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=64 # four updates a step
  actor_rollout_ref.rollout.n=8
  data.max_response_length=1024

  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 # of 80 GB; base and adapter keep 16

  trainer.n_gpus_per_node=1
  trainer.project_name=gsm8k
  trainer.experiment_name=qwen2.5-7b_grpo_lora
  trainer.total_epochs=15
  trainer.test_freq=10
  trainer.save_freq=20 # adapters alone: 1 GB each
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
