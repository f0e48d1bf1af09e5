#!/usr/bin/env bash
# Checks an installation on a machine with GPUs, on random weights of true shapes: nothing comes from a hub.
#     scripts/test_gpu.sh --quick                 one GPU of 40 GB or more, ten minutes
#     scripts/test_gpu.sh                         all rows for which there are GPUs, memory and packages; hours
#     scripts/test_gpu.sh --rows moe,gspo-7b      some of them; --list names them, --plan checks their configurations
#     scripts/test_gpu.sh --cpu --rows quick-ppo  the same on a tiny model, on the CPU
#     PYTHON=python3.12 scripts/test_gpu.sh ...   with another Python than python3
# Each row leaves DIR/<row>/<stage>.log (--out DIR); DIR/table.md and DIR/results.json have them all, and the next start with the
# same DIR continues with what is missing. A table comes last, and a line for each failure; the exit status is 1 then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

exec "${PYTHON:-python3}" -m scripts.gpu.check "$@"
