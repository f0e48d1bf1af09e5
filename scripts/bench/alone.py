"""Seconds of vLLM's own ``LLM.generate``, without Tandem, on a task of step.py: what the engine takes alone, into a JSON file.

    python scripts/bench/step.py --device cuda --model DIR --prompt_length 256 --response_length 1024 --alone

runs it after the run, on the same task: same prompts, n, lengths, sampling, and memory; the best of REPEATS batches.
"""

import argparse
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoTokenizer

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""In one process and with the model runner of Tandem's workers (workers/rollout/vllm/vllm_engine.py)."""
REPEATS = 3
SHARE = 0.5
"""Of the memory: the default of actor_rollout_ref.rollout.gpu_memory_utilization."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="task.json of step.py; every response has its response_length")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    task = json.loads(args.task.read_text())
    tokenizer, size = AutoTokenizer.from_pretrained(task["model"]), task["prompts"]
    prompts = [
        {"prompt_token_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]}
        for messages in pq.read_table(task["train"])["prompt"].to_pylist()
    ]
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts) + task["response_length"]
    cuda = task["device"] == "cuda"
    os.environ |= ENVIRONMENT
    if find_spec("flashinfer") is None:  # vLLM's sampler imports it where the GPU could use it
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams  # it reads its environment variables when it is imported

    options = {"dtype": "bfloat16"} if cuda else {"dtype": "float32", "enforce_eager": True}
    engine = LLM(task["model"], max_model_len=longest, gpu_memory_utilization=SHARE if cuda else 0.05, **options)
    sampling = SamplingParams(
        n=task["n"], max_tokens=task["response_length"], ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False, seed=None
    )
    seconds = []
    # Batches differ, so that the prefix cache does not help.
    for start in range(0, REPEATS * size, size):
        began = time.perf_counter()
        found = engine.generate(prompts[start : start + size], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        tokens = sum(len(response.token_ids) for answer in found for response in answer.outputs)
        assert tokens == size * task["n"] * task["response_length"], tokens
    # To a file: vLLM's processes log to stdout.
    args.output.write_text(json.dumps({"seconds": seconds, "best": min(seconds), "tokens": tokens}))


if __name__ == "__main__":
    main()
