#!/usr/bin/env bash
# The benches on one GPU, part by part, on random weights of Qwen2.5's shapes: nothing comes from a hub.
#     scripts/bench/gpu.sh                      all parts but compare-0.5b
#     scripts/bench/gpu.sh train-7b sync-7b     some of them
#     scripts/bench/gpu.sh --cpu                the same on the CPU, of tiny models: does it work?
#     BENCH_OUT=DIR BENCH_MODELS=DIR PYTHON=python3 scripts/bench/gpu.sh    where results and models go
# Each part has a time limit, leaves DIR/<part>.json and DIR/<part>.log, and is told as it ends; a table of them all comes last.
# A part that fails does not stop the others; the exit status is 1 then. compare, beside verl, makes an environment for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${BENCH_OUT:-bench_gpu}
models=${BENCH_MODELS:-$out/models}
device=cuda
parts=(train-0.5b train-7b train-7b-recompute train-7b-float32 memory-0.5b memory-7b sync-0.5b sync-7b step-0.5b)
if [ "${1:-}" = --cpu ]; then
  shift
  device=cpu
  parts=(train-tiny memory-tiny sync-tiny step-tiny)
fi
[ $# -eq 0 ] || parts=("$@")
mkdir -p "$out" "$models"
failed=()

# bench PART SECONDS MODULE ARGUMENTS ...
bench() {
  local part=$1 limit=$2 module=$3 start=$SECONDS
  shift 3
  if timeout "$limit" "$python" -m "scripts.bench.$module" "$@" >"$out/$part.out" 2>"$out/$part.log" </dev/null; then
    echo "$part: done in $((SECONDS - start)) s" >&2
  else
    echo "$part: failed with $? after $((SECONDS - start)) s (its limit: $limit s), $out/$part.log ends with" >&2
    tail -n 5 "$out/$part.log" >&2
    rm "$out/$part.out"
    failed+=("$part")
  fi
}

# Updates of 8,192 packed tokens, all in bfloat16, which leaves room at 7B for what each layer's backward wants. recompute: without
# that. float32: recomputed too, with parameters, gradients and moments in float32, 120 GB at 7B.
train() { # SHAPE [recompute | float32]
  local size=(--tokens 8192 --longest 2048) kept=bfloat16
  [ "$device" = cuda ] || size=(--tokens 256 --rounds 1)
  [ -z "${2:-}" ] || size+=(--recompute)
  [ "${2:-}" != float32 ] || kept=float32
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True bench "train-$1${2:+-$2}" 300 train --shapes "$1" --dtypes bfloat16 \
    --model_dtype "$kept" --device "$device" --profile "${size[@]}"
}

worker() { # PART MODULE WORDS ...: what has a worker with a rollout engine
  local shape=${1#*-} part=$1 module=$2 size=()
  shift 2
  [ "$device" = cuda ] || size=(--rounds 1 --prompt_tokens 8 --max_tokens 8 --dtype float32 actor_rollout_ref.rollout.name=embedded)
  bench "$part" 400 "$module" "$@" --shape "$shape" --device "$device" --model "$models/$shape" "${size[@]}"
}

# A GRPO step with a KL loss: 32 prompts x 8 answers x (256 + 1,024) tokens. compare: and verl's.
step() { # PART SECONDS BENCH WORDS ...
  local shape=${1#*-} part=$1 limit=$2 module=$3 size=(--prompts 32 --n 8 --prompt_length 256 --response_length 1024) dtype=bfloat16
  shift 3
  [ "$device" = cuda ] || { size=(--prompts 2 --n 2 --prompt_length 4 --response_length 8) dtype=float32; }
  bench "model-$shape" 120 worker --shape "$shape" --device "$device" --dtype "$dtype" --model "$models/$shape"
  bench "$part" "$limit" "$module" "$@" "${size[@]}" --device "$device" --model "$models/$shape" trainer.backend=local
}

for part in "${parts[@]}"; do
  echo "$part: begins" >&2
  shape=${part#*-}
  case $part in
    train-*-*) train "${shape%-*}" "${shape##*-}" ;;
    train-*) train "$shape" ;;
    memory-*) worker "$part" memory --tokens "$([ "$device" = cuda ] && echo 8192 || echo 256)" ;;
    sync-*) worker "$part" rollout_gpu memory ;;
    step-*) step "$part" 500 step --steps "$([ "$device" = cuda ] && echo 4 || echo 2)" ;;
    engines-*) bench "$part" 300 engines fsdp one --shape "$shape" --device "$device" ;; # needs megatron-core
    compare-*) step "$part" 2400 compare --rival verl --rounds 1 --steps 2 --json "$out/$part.json" ;;
    *) echo "no part $part: train, memory, sync, step, engines, compare, each with -SHAPE (train-SHAPE-recompute, -float32)" >&2 && exit 2 ;;
  esac
done
"$python" -m scripts.bench.gpu_table "$out"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
