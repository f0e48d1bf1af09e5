#!/usr/bin/env bash
# PPO with a critic, and the KL to the reference in the reward (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022,
# arXiv:2203.02155): Qwen2-7B-Instruct on GSM8K and MATH. 8 GPUs of 80 GB, FSDP, SGLang. Not run here.
# Rows of 100 to 4,096 tokens are spread over GPUs and micro-batches by their cost (sequence balancing), which no key has to ask for.
#     python -m data_preprocess.gsm8k && python -m data_preprocess.math_dataset    # once, to ~/data; or DATA=folder
#     scripts/run_qwen2-7b_ppo_sglang.sh trainer.total_epochs=1                     # arguments are overrides
set -euo pipefail

settings=(
  recipe=gsm8k_math_ppo # data, model, PPO with KL in the reward, validation, checkpoints
  data.max_response_length=3072

  rollout=sglang
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6   # SGLang's: of the 59 GB that the models at rest leave free

  trainer.experiment_name=qwen2-7b_ppo_sglang
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
