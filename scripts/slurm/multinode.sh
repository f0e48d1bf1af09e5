#!/usr/bin/env bash
# One run over all nodes of a Slurm job: Ray on each, and the program on the first. Arguments go to trainer.main_ppo, and win.
# Other settings of your cluster (partition, account, time) are options of sbatch:
#     sbatch --nodes=4 --partition=gpu --time=12:00:00 scripts/slurm/multinode.sh algorithm=grpo rollout=vllm trainer.save_freq=20
# Five minutes before the time limit the run saves and stops; submit it again to resume.
#SBATCH --job-name=tandem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@300
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-.}"
[ ! -d .venv ] || export PATH="$PWD/.venv/bin:$PATH"
workers="${SLURM_GPUS_ON_NODE:-8}"
run=(python -m trainer.main_ppo "trainer.nnodes=$SLURM_JOB_NUM_NODES" "trainer.n_gpus_per_node=$workers" "$@")
[ "$SLURM_JOB_NUM_NODES" -gt 1 ] || exec "${run[@]}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first="${nodes[0]}"
ip="$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address)"
ip="${ip%% *}" # of several addresses the first
export RAY_ADDRESS="$ip:$((20000 + SLURM_JOB_ID % 10000))" # jobs that share a node do not share a port
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" # who has not got it cannot join, nor start anything
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

ray=(env -u RAY_ADDRESS ray start --block --disable-usage-stats "--resources={\"tandem_slot\": $workers}") # with trainer.device=cpu
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT # Ray ends before the job does
here=(--nodes=1 --ntasks=1 --nodelist="$first")
there=(--nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 --exclude="$first")
srun "${here[@]}" "${ray[@]}" --head --node-ip-address="$ip" --port="${RAY_ADDRESS#*:}" --include-dashboard=false &
head=$!
for _ in $(seq 60); do
  ! ray status >/dev/null 2>&1 || break
  kill -0 "$head" 2>/dev/null || { echo "ray did not start on $first" >&2; exit 1; }
  sleep 1
done
srun "${there[@]}" "${ray[@]}" --address="$RAY_ADDRESS" &

"${run[@]}" &
program=$!
trap 'kill -USR1 "$program"' USR1 # the batch system signals only this shell
trap 'kill -TERM "$program"' TERM
code=0
wait "$program" || code=$?
while kill -0 "$program" 2>/dev/null; do # a signal ended the wait, not the program
  wait "$program" && code=0 || code=$?
done
again=0
wait "$program" || again=$? # its own code, if the last wait was ended as it went; 127: that had it
[ "$again" -eq 127 ] || code=$again
exit "$code"
