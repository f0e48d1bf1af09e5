#!/usr/bin/env bash
# RLHF from the first stage to the last, on two CPU cores in minutes: a tiny model learns from worked examples, a reward model
# from pairs of its responses, PPO from the reward model alone, and a report compares the reward model's scores with the truth.
#     scripts/run_rlhf_chain_cpu.sh                               into runs/rlhf_chain
#     SEED=2 FOLDER=runs/no_ptx scripts/run_rlhf_chain_cpu.sh actor_rollout_ref.actor.ptx_coef=0        arguments go to PPO
# A stage that is done is not done again, unless its command or the files that it reads have changed: docs/rlhf_chain.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${FOLDER:=runs/rlhf_chain}" "${SEED:=1}" "${SFT_STEPS:=96}" "${REWARD_STEPS:=256}" "${PPO_STEPS:=200}"
: "${COMPARED:=6144}" "${TESTED:=512}" # prompts of the reward model's pairs, and of the comparison
: "${ANSWERS:=16}"                     # responses per prompt of the comparison, of which the best is taken
if [ -z "${PYTHON:-}" ]; then
  scripts/setup_env.sh
  PYTHON=.venv/bin/python
fi

# NAME "FILES" MODULE ARGUMENT...: the module reads the files below $FOLDER and writes into $FOLDER/NAME; its file `stage` has
# their hashes.
stage() {
  local name=$1 reads=$2 dir=$FOLDER/$1 asked started=$SECONDS
  shift 2
  asked=$(
    echo "python -m $*"
    # shellcheck disable=SC2086 # several files
    [ -z "$reads" ] || { cd "$FOLDER" && find $reads -type f -print0 | sort -z | xargs -0 sha256sum; }
  )
  if [ "$(grep -v '^seconds ' "$dir/stage" 2>/dev/null)" = "$asked" ]; then
    echo "== $name: done before"
    return
  fi
  echo "== $name"
  # A stopped stage resumes from its checkpoint or with the missing responses; main_export cannot, and starts again.
  [ "$name" != policy ] && [ "$(cat "$dir/stage.begun" 2>/dev/null)" = "$asked" ] || rm -rf "$dir"
  mkdir -p "$dir"
  echo "$asked" >"$dir/stage.begun"
  "$PYTHON" -m "$@"
  echo "seconds $((SECONDS - started))" | cat "$dir/stage.begun" - >"$dir/stage.whole"
  mv "$dir/stage.whole" "$dir/stage"
}

# One worker in each program's own process: to start a Ray cluster takes longer than most of these stages.
here=(trainer.device=cpu trainer.backend=local trainer.n_gpus_per_node=1 "trainer.seed=$SEED")
# The right answer has six digits and an end token; longer responses are wrong, but only those that do not terminate are truncated.
task=(data.max_prompt_length=8 data.max_response_length=12 reward.num_workers=0)
answers=("${here[@]}" "${task[@]}" data.batch_size=1024 selection.score=true
  actor_rollout_ref.rollout.dtype=float32 actor_rollout_ref.rollout.max_num_seqs=1024)
# The rule, which knows the truth, also scores, with weight 0.
judged=(reward.weight=0 reward.reward_model.enable=true reward.reward_model.path="$FOLDER/reward/model"
  reward.reward_model.normalize=stored reward.reward_model.fsdp_config.dtype=float32)

stage data "" data_preprocess.sort_digits --local_save_dir "$FOLDER/data"
stage base "" data_preprocess.tiny_model --save_dir "$FOLDER/base/model" --seed "$SEED"

stage sft "base/model data/sft.parquet" trainer.main_sft recipe=sort_digits "${here[@]}" trainer.resume_mode=auto \
  model.path="$FOLDER/base/model" data.train_files="$FOLDER/data/sft.parquet" optim.lr_scheduler_type=cosine \
  trainer.total_training_steps="$SFT_STEPS" trainer.default_local_dir="$FOLDER/sft" trainer.export_dir="$FOLDER/sft/model"

# Pairs of its own responses: the rule replaces the people who would compare them.
stage pairs "sft/model data/train.parquet" trainer.main_generation "${answers[@]}" \
  actor_rollout_ref.model.path="$FOLDER/sft/model" data.path="$FOLDER/data/train.parquet" data.max_samples="$COMPARED" \
  actor_rollout_ref.rollout.n=8 selection.max_per_prompt=4 \
  selection.preferences="$FOLDER/pairs/pairs.parquet" trainer.default_local_dir="$FOLDER/pairs"

# Also on pairs of right and slightly wrong responses, which the model will give once it is better.
stage reward \
  "sft/model pairs/pairs.parquet data/preferences.parquet data/preferences_test.parquet" \
  trainer.main_reward_model recipe=sort_digits "${here[@]}" trainer.resume_mode=auto \
  model.path="$FOLDER/sft/model" data.max_length=24 \
  data.train_files="[$FOLDER/pairs/pairs.parquet,$FOLDER/data/preferences.parquet]" \
  data.val_files="$FOLDER/data/preferences_test.parquet" \
  optim.lr_scheduler_type=cosine trainer.total_training_steps="$REWARD_STEPS" trainer.test_freq=32 \
  trainer.default_local_dir="$FOLDER/reward" trainer.export_dir="$FOLDER/reward/model"

# Actor and reference start as the fine-tuned model, the critic as the reward model; PPO-ptx also trains on the fine-tuning texts.
stage ppo "sft/model reward/model data/train.parquet data/test.parquet data/sft.parquet" \
  trainer.main_ppo recipe=quickstart algorithm=ppo "${here[@]}" "${task[@]}" "${judged[@]}" \
  actor_rollout_ref.model.path="$FOLDER/sft/model" critic.model.path="$FOLDER/reward/model" \
  data.train_files="$FOLDER/data/train.parquet" data.val_files="$FOLDER/data/test.parquet" data.val_max_samples="$TESTED" \
  data.ptx_files="$FOLDER/data/sft.parquet" actor_rollout_ref.actor.ptx_ratio=0.25 \
  algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.02 reward.missing_eos_penalty=1.0 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=5e-4 trainer.critic_warmup=5 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  trainer.total_training_steps="$PPO_STEPS" trainer.save_freq=25 \
  trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1 \
  trainer.default_local_dir="$FOLDER/ppo" "$@"
stage policy "ppo/latest_checkpointed_iteration.txt ppo/metrics.jsonl" \
  trainer.main_export checkpoint="$FOLDER/ppo" output="$FOLDER/policy/model"

# The same prompts and seeds for both models, scored by the rule and by the reward model, which selects the best.
for model in sft policy; do
  stage "${model}_answers" "$model/model reward/model data/test.parquet" trainer.main_generation \
    "${answers[@]}" "${judged[@]}" actor_rollout_ref.model.path="$FOLDER/$model/model" \
    data.path="$FOLDER/data/test.parquet" data.max_samples="$TESTED" actor_rollout_ref.rollout.n="$ANSWERS" \
    selection.best_of_n="$FOLDER/${model}_answers/best.parquet" trainer.default_local_dir="$FOLDER/${model}_answers"
done
"$PYTHON" -m trainer.evaluation.chain "$FOLDER"
