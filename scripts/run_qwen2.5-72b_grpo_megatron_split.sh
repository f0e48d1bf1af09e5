#!/usr/bin/env bash
# GRPO without KL at 72B, the trainer and the engine on nodes of their own: Qwen2.5-72B-Instruct on GSM8K and MATH.
# 32 GPUs of 80 GB, 4 nodes: Megatron on three, vLLM on the fourth; weights go over by process group. Run
# here on CPU alone, with a tiny model: a pipeline of two, and vLLM in a pool of its own.
#     ray start --head                               # on the first node; on the others: ray start --address=<first node>:6379
#     scripts/run_qwen2.5-72b_grpo_megatron_split.sh # on the first; models and data where every node finds them
set -euo pipefail

settings=(
  recipe=gsm8k_math # data, validation, checkpoints (1 TB each)
  trainer.nnodes=4
  placement=split # docs/placement.md
  placement.pools='{actor: {nodes: 3, gpus: 8, fraction: 1}, rollout: {nodes: 1, gpus: 8, fraction: 1}}'

  # 18 bytes a parameter (2 its weight, 4 its gradient, 12 the optimizer's) are 1,309 GB: 82 a GPU on two nodes, 55 on three.
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8   # a node
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3 # nodes
  actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=26 # of 80, with the embedding
  actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=26  # with the head
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 # some 35 micro-batches an update, so that three stages seldom wait

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=8
  actor_rollout_ref.rollout.gpu_memory_utilization=0.9 # of 80 GB: 18 for weights, the rest for the cache; no other model is there

  algorithm.adv_estimator=grpo
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=64 # four updates a step
  actor_rollout_ref.rollout.n=8
  data.max_response_length=2048

  actor_rollout_ref.model.path=Qwen/Qwen2.5-72B-Instruct

  trainer.experiment_name=qwen2.5-72b_grpo_megatron_split
  trainer.total_epochs=3 # 58 steps each
  trainer.test_freq=10
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
