#!/usr/bin/env bash
# Makes .venv and installs Tandem into it, editable, with the dependencies of the core and of the named extras:
#     scripts/setup_env.sh [dev|hub|wandb ...]
# On a machine without a GPU, dev also installs the CPU builds of all engines, and a Ray job server, for the tests.
# Run again, it returns at once unless pyproject.toml or the requirements changed. After adding a GPU: rm -rf .venv.
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

constraints=requirements/constraints-cpu.txt
torch_cpu_index=https://download.pytorch.org/whl/cpu

# One empty file in .venv says that a part is installed; its name holds a hash of what the installation depends on.
key=$({ pwd; cat pyproject.toml requirements/*.txt; } | sha256sum | cut -c1-16)
missing=()
for part in core "$@"; do
  [ -e ".venv/installed-$key-$part" ] || missing+=("$part")
done
[ ${#missing[@]} -gt 0 ] || exit 0

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Tandem needs Python 3.11 or newer with its venv module (on Debian and Ubuntu: python3-venv); found none. Set PYTHON to one." >&2
  return 1
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# stage <what> <command ...>: one line with its seconds; on failure the last lines of what the command printed.
stage() {
  local what=$1 start=$SECONDS
  shift
  printf '%s ... ' "$what"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    printf 'failed after %d s\n' "$((SECONDS - start))"
    tail -n 20 "$log" >&2
    return 1
  fi
  printf '%d s\n' "$((SECONDS - start))"
}

if ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(find_python)
  stage "Environment .venv ($("$python" --version))" "$python" -m venv --clear .venv
elif ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  stage "pip in .venv" .venv/bin/python -m ensurepip
fi
find .venv -maxdepth 1 -name 'installed-*' ! -name "installed-$key-*" -delete

torch_index=()
if nvidia-smi >/dev/null 2>&1; then
  build="for this machine's NVIDIA GPU"
  engines=none
  grep -v '^torch==' "$constraints" >.venv/constraints.txt # any torch in the range of pyproject.toml, in the build that pip has
else
  build="CPU build"
  engines=all
  cp "$constraints" .venv/constraints.txt
  if timeout 5 .venv/bin/python -c \
    "import urllib.request as r; r.urlopen(r.Request('$torch_cpu_index/torch/', method='HEAD'), timeout=4)" 2>/dev/null; then
    torch_index=(--extra-index-url "$torch_cpu_index")
  fi
fi
install=(.venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off --constraint .venv/constraints.txt)
stage "PyTorch, $build" "${install[@]}" "${torch_index[@]}" torch
extras=$(IFS=,; echo "$*")
stage "Tandem and what it imports${extras:+ [$extras]}" "${install[@]}" --editable ".${extras:+[$extras]}"
if [[ " $* " == *" dev "* && $engines == all ]]; then
  # Apart: where all of ray[default] is installed, every Ray starts slower.
  stage "A Ray job server's packages" "${install[@]}" --no-deps --upgrade --target .venv/ray-default -r requirements/ray-default.txt
  stage "Engines, CPU builds" env PYTHON=.venv/bin/python scripts/install_engine.sh all cpu
fi
for part in core "$@"; do
  : >".venv/installed-$key-$part"
done
