#!/usr/bin/env bash
# Sweep over three learning rates and two seeds of recipe=gsm8k_0.5b: 6 runs, one after the other, each in its own directory,
# checkpoints/sweep_gsm8k_0.5b/0 to 5, with its report.html. 1 GPU of 24 GB, vLLM. Not run here.
#     scripts/sweep_qwen2.5-0.5b_grpo.sh trainer.total_epochs=1
#     python -m trainer.main_compare checkpoints/sweep_gsm8k_0.5b    # their curves side by side, bands over the seeds
set -euo pipefail

settings=(
  recipe=gsm8k_0.5b
  rollout=vllm
  "actor_rollout_ref.actor.optim.lr=5e-7,1e-6,3e-6"
  "trainer.seed=1,2"
  trainer.total_epochs=3 # 87 steps: enough to tell them apart
  trainer.default_local_dir=checkpoints/sweep_gsm8k_0.5b
)
set -x
exec python -m trainer.main_ppo --multirun "${settings[@]}" "$@"
