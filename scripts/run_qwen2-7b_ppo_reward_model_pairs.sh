#!/usr/bin/env bash
# PPO against a reward model (Ouyang et al. 2022, arXiv:2203.02155) in two pairs: actor, reference and engine on one half of the GPUs,
# critic and reward model on the other, where values and scores are computed while the actor's log-probs are, and the critic learns while
# the actor does. Qwen2-7B-Instruct on the prompts of GSM8K and MATH, whose rules do not decide here, but show whether the model is
# right. 8 GPUs of 80 GB, FSDP, vLLM. Run here on CPU alone, with tiny models and the embedded engine.
set -euo pipefail

settings=(
  recipe=gsm8k_math_ppo # data, model, PPO with KL in the reward, validation, checkpoints
  placement=colocate_pairs # docs/placement.md
  reward.reward_model.enable=true
  reward.reward_model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 # a classifier with one label, and a tokenizer and template of its own
  reward.reward_model.normalize=running # its scores have no scale that the KL could be weighed against
  reward.reward_model.fsdp_config.model_dtype=bfloat16 # it never learns
  reward.weight=0 # the rules are measured: over-optimisation is the one curve rising while the other falls
  algorithm.kl_ctrl.kl_coef=0.01

  critic.ppo_max_token_len_per_gpu=16384 # as the actor's; the default, 32,768, would take 8 GB more

  rollout=vllm

  trainer.experiment_name=qwen2-7b_ppo_reward_model_pairs
)
set -x
exec python -m trainer.main_ppo "${settings[@]}" "$@"
