#!/usr/bin/env bash
# The speed benches on this machine's GPUs, with goals, limits and a rival's figures: see scripts/bench/gpu.py, or --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-python3}" -m scripts.bench.gpu "$@"
