#!/usr/bin/env bash
# run_qwen2-7b_ppo_sglang.sh with every model on Megatron (Shoeybi et al. 2019, arXiv:1909.08053): the same data, batch and losses.
# 8 GPUs of 80 GB, Megatron, SGLang. Not run here.
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  algorithm.use_kl_in_reward=true # beside PPO with a critic, which is the default
  data.train_files="['$data/gsm8k/train.parquet','$data/math/train.parquet']"
  data.val_files="['$data/gsm8k/test.parquet','$data/math/test.parquet']"
  data.max_prompt_length=1024
  data.max_response_length=3072
  data.filter_overlong_prompts=true

  # The critic and the reference follow the actor's cut. Two GPUs a copy, four copies: of 3.8B parameters a GPU holds 2 bytes, their
  # gradients 4, and a quarter of the optimizer's 12: 34 GB. Two such models do not fit beside an engine: what rests is on the host.
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.actor.megatron.param_offload=true
  actor_rollout_ref.actor.megatron.grad_offload=true
  actor_rollout_ref.actor.megatron.optimizer_offload=true

  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
  critic.model.path=Qwen/Qwen2-7B-Instruct

  rollout=sglang
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 # the engine's cut has nothing to do with the trainer's
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8   # the trainer is on the host

  trainer.project_name=gsm8k_math
  trainer.experiment_name=qwen2-7b_ppo_megatron
  trainer.total_epochs=15
  trainer.test_freq=5
  trainer.save_freq=20
  trainer.max_actor_ckpt_to_keep=1
  trainer.max_critic_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
