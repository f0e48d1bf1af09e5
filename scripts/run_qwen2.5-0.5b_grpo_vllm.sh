#!/usr/bin/env bash
# The smallest real experiment: Qwen2.5-0.5B-Instruct on GSM8K with GRPO (arXiv:2402.03300). 1 GPU of 24 GB, FSDP, vLLM. Run on one H200
# with a model of this shape and random weights (docs/gpu.md).
# All numbers are in configs/recipe/gsm8k_0.5b.yaml; `algorithm=ppo` behind it trains with a critic instead, in 40 GB.
#     python -m data_preprocess.gsm8k    # once, to ~/data/gsm8k
set -euo pipefail

set -x
exec python -m trainer.main_ppo recipe=gsm8k_0.5b rollout=vllm "$@"
