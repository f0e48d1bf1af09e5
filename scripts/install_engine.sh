#!/usr/bin/env bash
# Installs engines into .venv, which scripts/setup_env.sh made:
#     scripts/install_engine.sh vllm|sglang|megatron|all [cpu|cuda]
# Without the second word: cuda if there is an NVIDIA GPU, else cpu. PYTHON=/path/to/python chooses another environment.
# docs/install.md says which versions go together.
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
case "$engine" in
  vllm | sglang | megatron) engines=("$engine") ;;
  all) engines=(vllm sglang megatron) ;;
  *) fail "usage: scripts/install_engine.sh vllm|sglang|megatron|all [cpu|cuda]; no engine: ${engine:-none given}" ;;
esac
case "$device" in
  cpu)
    what=(--no-deps)
    for name in "${engines[@]}"; do
      what+=(--requirement "requirements/$name-cpu.txt")
    done
    ;;
  cuda) what=(--editable ".[$(IFS=,; echo "${engines[*]}")]") ;;
  *) fail "usage: scripts/install_engine.sh vllm|sglang|megatron|all [cpu|cuda]; no device: $device" ;;
esac
"$python" -m pip --version >/dev/null 2>&1 || fail "no pip in $python: run scripts/setup_env.sh first, or set PYTHON"
exec "${pip[@]}" "${what[@]}"
