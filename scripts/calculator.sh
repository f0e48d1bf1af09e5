#!/usr/bin/env bash
# A tiny model learns to call a tool: environment, data, a warm start on conversations with tool calls, then training with GRPO on CPU.
# Run again, it trains again, in a new run directory, without the set-up. Arguments go to trainer.main_ppo:
#     scripts/calculator.sh actor_rollout_ref.rollout.multi_turn.enable=false    # without the tool, for comparison
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
python=.venv/bin/python
data=data/calculator

if [ ! -e $data/whole ]; then
  "$python" -m data_preprocess.calculator --local_save_dir $data
  # What every call has in common is one token, so that a call has 12 tokens instead of 60.
  "$python" -m data_preprocess.tiny_model --save_dir $data/base --seed 1 --tools --alphabet 0123456789+ \
    --words calculator '{"name": "calculator", "arguments": {"expression": "' '"}}'
  echo "A warm start: the model learns from conversations in which the calculator is called for about a third of the problems"
  "$python" -m trainer.main_sft sft_recipe=calculator trainer.export_dir=$data/warm
  : >$data/whole
fi
echo "Training with GRPO"
exec "$python" -m trainer.main_ppo recipe=calculator trainer.default_local_dir="runs/calculator-$(date +%Y%m%d-%H%M%S)" "$@"
