#!/usr/bin/env bash
# PPO with a critic, and the KL to the reference in the reward (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022,
# arXiv:2203.02155): Qwen2-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, SGLang. Not run here.
# Rows of 100 to 4,096 tokens are spread over GPUs and micro-batches by their cost (sequence balancing), which no key has to ask for.
#     python -m data_preprocess.gsm8k && python -m data_preprocess.math_dataset    # once, to ~/data; or DATA=folder
#     scripts/run_qwen2-7b_ppo_sglang.sh trainer.total_epochs=1                     # arguments are overrides
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  algorithm.use_kl_in_reward=true # beside PPO with a critic, which is the default
  data.train_files="['$data/gsm8k/train.parquet','$data/math/train.parquet']" # 14,973 prompts: 14 steps of 1,024 an epoch
  data.val_files="['$data/gsm8k/test.parquet','$data/math/test.parquet']"
  data.max_prompt_length=1024
  data.max_response_length=3072
  data.filter_overlong_prompts=true # a few of MATH's

  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
  critic.model.path=Qwen/Qwen2-7B-Instruct

  rollout=sglang
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 # 15 GB of weights fit a GPU: 8 engines
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6   # SGLang's: of the 59 GB that the models at rest leave free

  trainer.project_name=gsm8k_math
  trainer.experiment_name=qwen2-7b_ppo_sglang
  trainer.total_epochs=15
  trainer.test_freq=5
  trainer.save_freq=20
  trainer.max_actor_ckpt_to_keep=1 # 91 GB each, and the critic's 85
  trainer.max_critic_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
