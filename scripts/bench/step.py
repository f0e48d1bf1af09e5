"""Tokens per second of whole GRPO or PPO steps, and where the time goes, as JSON.

    python scripts/bench/step.py                          # 32 prompts x 8 answers x (17 + 63) tokens, 3.4M parameters
    python scripts/bench/step.py --algorithm ppo --steps 3 algorithm.use_kl_in_reward=true

It runs `python -m trainer.main_ppo` on a model with random weights and prompts of random digits, answers forced to their
full length, and reads the run's metrics.jsonl. The first step is left out (--warmup). Further arguments are overrides.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from data_preprocess import tiny_model
from data_preprocess.writer import rl_row, write

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""
WORK = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--n", type=int, default=8, help="answers a prompt")
    parser.add_argument("--prompt_length", type=int, default=17)
    parser.add_argument("--response_length", type=int, default=63)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_hidden_layers", type=int, default=4)
    parser.add_argument("--intermediate_size", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=460)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="first steps left out")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args, overrides, Path(folder)), indent=1))


def measure(args: argparse.Namespace, overrides: list[str], folder: Path) -> dict[str, object]:
    """One run; medians over its steps."""
    tiny_model.main(
        [f"--save_dir={folder / 'model'}", f"--hidden_size={args.hidden_size}", f"--num_hidden_layers={args.num_hidden_layers}",
         f"--intermediate_size={args.intermediate_size}", "--no-tie_word_embeddings"]
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.resize_token_embeddings(args.vocab)
    model.save_pretrained(folder / "model")
    digits = np.random.default_rng(0).integers(0, 10, (args.prompts * (args.steps + 1), args.prompt_length))
    rows = [
        rl_row(data_source="bench", prompt="".join(map(str, line)), ability="", ground_truth="", split="train", index=i)
        for i, line in enumerate(digits.tolist())
    ]
    write(rows, folder, "train")
    (folder / "reward.py").write_text(REWARD)
    command = [
        sys.executable, "-m", "trainer.main_ppo", f"algorithm={args.algorithm}",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}", f"data.max_prompt_length={args.prompt_length}",
        f"data.max_response_length={args.response_length}",
        f"actor_rollout_ref.model.path={folder}/model", f"critic.model.path={folder}/model",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}", f"actor_rollout_ref.rollout.n={args.n}",
        "actor_rollout_ref.rollout.ignore_eos=true", "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false", "critic.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "critic.fsdp_config.dtype=float32", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "critic.ppo_max_token_len_per_gpu=4096",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[]", "trainer.val_before_train=false",
        f"trainer.total_training_steps={args.steps}", f"trainer.default_local_dir={folder}/run", *overrides,
    ]  # fmt: skip
    start = time.time()
    subprocess.run(command, check=True, stdout=sys.stderr)
    wall = time.time() - start
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = steps[args.warmup :]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in measured)

    phases = sorted(name for name in measured[0] if name.startswith("timing_s/"))
    seconds = {name.removeprefix("timing_s/"): median(name) for name in phases}
    outside = [1.0 - sum(step.get(f"timing_s/{phase}", 0.0) for phase in WORK) / step["timing_s/step"] for step in measured]
    return {
        "settings": vars(args) | {"overrides": overrides, "parameters": model.num_parameters()},
        "tokens_per_step": measured[0]["perf/total_num_tokens"],
        "tokens_per_s": median("perf/throughput"),
        "seconds": seconds,
        "share_outside_generate_log_prob_update": statistics.median(outside),
        "mfu": median("perf/mfu") if "perf/mfu" in measured[0] else None,
        # Start-up, the first weight sync, the report and the clean stop: an upper bound of the time to the first step.
        "seconds_outside_steps": wall - sum(step["timing_s/step"] for step in steps),
    }


if __name__ == "__main__":
    main()
