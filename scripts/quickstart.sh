#!/usr/bin/env bash
# From a fresh clone to a report: environment, data, a tiny warm-started model, then training with GRPO on CPU.
# Run again, it trains again, in a new run directory, without the set-up. Arguments go to trainer.main_ppo:
#     scripts/quickstart.sh trainer.seed=12 trainer.total_training_steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
python=.venv/bin/python
data=data/sort_digits

if [ ! -e $data/whole ]; then
  "$python" -m data_preprocess.sort_digits --local_save_dir $data
  "$python" -m data_preprocess.tiny_model --save_dir $data/base --seed 1
  echo "A warm start: the model learns from worked examples until it is right about half of the time"
  "$python" -m trainer.main_sft recipe=sort_digits trainer.export_dir=$data/warm
  : >$data/whole
fi
echo "Training with GRPO"
exec "$python" -m trainer.main_ppo recipe=quickstart trainer.default_local_dir="runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
