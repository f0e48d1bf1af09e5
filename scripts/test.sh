#!/usr/bin/env bash
# Sets up the tests' environment, then runs ruff, mypy and pytest. Arguments go to pytest; the last output is pytest's summary.
#     scripts/test.sh                   all but the long ones, two files at a time
#     scripts/test.sh tests/layout -x   some of them, one at a time
#     scripts/test.sh soak              the long ones: learning tables, kills
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh dev
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile every module again
export OMP_NUM_THREADS=1 # two threads a process make small products many times slower when processes share the cores
python=.venv/bin/python

if [ "${1:-}" = soak ]; then
  shift
  exec "$python" -m pytest -m soak --timeout 3600 "$@" </dev/null
fi
"$python" -m ruff check .
"$python" -m mypy
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder --durations 40
exec "$python" -m pytest "$@" </dev/null
