# Sourced by scripts/calculator.sh and scripts/search_local.sh, which set recipe, and alphabet and words of the tiny model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
python=.venv/bin/python
data=data/$recipe

if [ ! -e "$data/whole" ]; then
  "$python" -m "data_preprocess.$recipe" --local_save_dir "$data"
  "$python" -m data_preprocess.tiny_model --save_dir "$data/base" --seed 1 --tools --alphabet "$alphabet" --words "${words[@]}"
  echo "A warm start: the model learns from conversations in which the tool is called for about a third of the problems"
  "$python" -m trainer.main_sft "sft_recipe=$recipe" "trainer.export_dir=$data/warm"
  : >"$data/whole"
fi
echo "Training with GRPO"
exec "$python" -m trainer.main_ppo "recipe=$recipe" "trainer.default_local_dir=runs/$recipe-$(date +%Y%m%d-%H%M%S)" "$@"
