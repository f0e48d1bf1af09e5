"""Stand-ins for Slurm's programs: jobs run on this machine, immediately, and again if they are requeued."""

import sys
from pathlib import Path

from tests.layout.source import ROOT

# Slurm keeps a copy of the script, and so does this one: submitit renames its file as soon as sbatch has returned.
SBATCH = r"""#!/usr/bin/env bash
id=$((7 + $(find "$SLURM_STAND_IN" -name "batch_*.sh" | wc -l)))
cp "$1" "$SLURM_STAND_IN/batch_$id.sh"
if grep -q "^#SBATCH --partition=none$" "$1"; then
  echo "sbatch: error: invalid partition specified: none" >&2
  exit 1
fi
for task in $(seq 0 "$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$1")"); do
  touch "$SLURM_STAND_IN/job_${id}_$task"
  SLURM_JOB_ID=$id$task SLURM_ARRAY_JOB_ID=$id SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 \
    SLURM_JOB_NODELIST=n1 "$SLURM_STAND_IN/node" "$SLURM_STAND_IN/batch_$id.sh" "${id}_$task" </dev/null >/dev/null 2>&1 &
done
echo "Submitted batch job $id"
"""
# A job, until it ends without being requeued, by its own process or by Slurm: twice_7_0. over_7_0: the state of job 7_0 if it
# ends before it starts.
NODE = r"""#!/usr/bin/env bash
cd "$SLURM_STAND_IN" || exit
again() {
  mv "requeued_$2" "again_$2" 2>/dev/null || rm "twice_$2" 2>/dev/null
}
if [ ! -e "over_$2" ]; then
  while (cd "$OLDPWD" && bash "$1"); again "$@"; do :; done
  echo COMPLETED >"over_$2"
fi
mv "over_$2" "ended_$2"
"""
SRUN = r"""#!/usr/bin/env bash
while [[ "$1" == --* ]]; do
  case $1 in --output | --error) shift ;; esac
  shift
done
exec "$@"
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "$*" >>"$SLURM_STAND_IN/scontrol_calls"
[ "$1" = requeue ] && touch "$SLURM_STAND_IN/requeued_$2"
"""
SQUEUE = r"""#!/usr/bin/env bash
cd "$SLURM_STAND_IN" || exit
[ ! -e down ] || exit 1
for job in job_*; do
  [ -e "$job" ] && echo "${job#job_}|$(cat "ended_${job#job_}" 2>/dev/null || echo RUNNING)"
done
exit 0
"""


def stand_in(folder: Path) -> dict[str, str]:
    """Environment in which the stand-ins are found.

    folder: new; gets batch_7.sh, batch_8.sh ... of the jobs, and scontrol_calls, the arguments of scontrol. If it contains
    ``down``, squeue fails, as if Slurm's controller did not respond.
    """
    folder.mkdir()
    for name, text in {"sbatch": SBATCH, "node": NODE, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"PATH": path, "SLURM_STAND_IN": str(folder), "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
