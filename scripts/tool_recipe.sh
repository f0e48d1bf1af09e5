#!/usr/bin/env bash
# The steps of scripts/calculator.sh and scripts/search_local.sh: tool_recipe.sh RECIPE ARGUMENT...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=$1
shift
# What all questions, calls and results have in common are single tokens, so that a call has 9 to 12 tokens instead of 60.
case $recipe in
  calculator)
    alphabet=0123456789+
    words=(calculator '{"name": "calculator", "arguments": {"expression": "' '"}}')
    ;;
  search_local)
    alphabet=0123456789abcdefghijklmnopqrstuvwxyz?
    words=(search 'Code of ' '{"name": "search", "arguments": {"query_list": ["' '"]}}' '{"result": "Doc 1 (Title: ' ')\nThe code of ' ' is ' '."}'
      '{"result": ""}')
    ;;
esac

scripts/setup_env.sh
python=.venv/bin/python
data=data/$recipe

if [ ! -e "$data/whole" ]; then
  "$python" -m "data_preprocess.$recipe" --local_save_dir "$data"
  "$python" -m data_preprocess.tiny_model --save_dir "$data/base" --seed 1 --tools --alphabet "$alphabet" --words "${words[@]}"
  echo "A warm start: the model learns from conversations in which the tool is called for about a third of the problems"
  "$python" -m trainer.main_sft "recipe=$recipe" "trainer.export_dir=$data/warm"
  : >"$data/whole"
fi
echo "Training with GRPO"
exec "$python" -m trainer.main_ppo "recipe=$recipe" "trainer.default_local_dir=runs/$recipe-$(date +%Y%m%d-%H%M%S)" "$@"
