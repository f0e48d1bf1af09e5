#!/usr/bin/env bash
# PPO against a reward model (Ouyang et al. 2022, arXiv:2203.02155) in two pairs: actor, reference and engine on one half of the GPUs,
# critic and reward model on the other, where values and scores are computed while the actor's log-probs are, and the critic learns while
# the actor does. Qwen2-7B-Instruct on the prompts of GSM8K and MATH, whose rules do not decide here, but show whether the model is
# right. 8 GPUs of 80 GB, FSDP, vLLM. Run here on CPU alone, with tiny models and the embedded engine.
set -euo pipefail

data=${DATA:-$HOME/data}
settings=(
  placement=colocate_pairs # docs/placement.md
  reward.reward_model.enable=true
  reward.reward_model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 # a classifier with one label, and a tokenizer and template of its own
  reward.reward_model.normalize=running # its scores have no scale that the KL could be weighed against
  reward.reward_model.fsdp_config.model_dtype=bfloat16 # it never learns
  reward.weight=0 # the rules are measured: over-optimisation is the one curve rising while the other falls
  algorithm.use_kl_in_reward=true
  algorithm.kl_ctrl.kl_coef=0.01

  data.train_files="['$data/gsm8k/train.parquet','$data/math/train.parquet']"
  data.val_files="['$data/gsm8k/test.parquet','$data/math/test.parquet']"
  data.max_prompt_length=1024
  data.filter_overlong_prompts=true

  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
  critic.model.path=Qwen/Qwen2-7B-Instruct
  critic.ppo_max_token_len_per_gpu=16384 # as the actor's; the default, 32,768, would take 8 GB more

  rollout=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 # 15 GB of weights fit a GPU: 4 engines

  trainer.project_name=gsm8k_math
  trainer.experiment_name=qwen2-7b_ppo_reward_model_pairs
  trainer.total_epochs=15
  trainer.test_freq=5
  trainer.save_freq=20
  trainer.max_actor_ckpt_to_keep=1 # 91 GB each, and the critic's 85
  trainer.max_critic_ckpt_to_keep=1
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
