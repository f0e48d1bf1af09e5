"""Learning curves of every method and engine: held-out accuracy on the quick-start task, by seed, as JSON and as a picture.

    python scripts/bench/learning.py                              # every method, seeds 21 22 23, 60 steps: 15 minutes
    python scripts/bench/learning.py --methods grpo rloo --picture docs/learning.png
    python scripts/bench/learning.py --engines embedded vllm sglang      # GRPO on each of them, 120 steps
    python scripts/bench/learning.py --megatron grpo-tp2 grpo-pp2 ppo-tp2 ppo-pp2    # two workers, 80 steps

Each seed has its own model, warmed up as in scripts/quickstart.sh. Methods run one after the other.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STEPS, ENGINE_STEPS, MEGATRON_STEPS, TEST_FREQ = 60, 120, 80, 10
SEEDS = (21, 22, 23)
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
TWO_UPDATES = (f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.optim.lr=2e-4")  # a step: so that the ratio is not always 1
# The greedy answer is right far more often (.68) than a sample at temperature 1 (.19): then all advantages are negative.
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
NEAR_GREEDY = (f"{TEMPERATURE}=0.5", f"{ACTOR}.optim.lr=1.5e-4")
METHODS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce++": ("algorithm.adv_estimator=reinforce_plus_plus", f"{TEMPERATURE}=0.7", f"{ACTOR}.optim.lr=2e-4"),
    "remax": ("algorithm.adv_estimator=remax", *NEAR_GREEDY),
    "gspo": (f"{LOSS}=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", *TWO_UPDATES),
    "cispo": (f"{LOSS}=cispo", *TWO_UPDATES),
    "ppo": ("algorithm=ppo",),
    "grpo-lora": ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32", f"{ACTOR}.optim.lr=2e-3"),
}
ENGINES: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "vllm": ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    "sglang": ("rollout=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
}
MEGATRON_ACTOR = ("trainer.n_gpus_per_node=2", f"{ACTOR}.strategy=megatron")
MEGATRON: dict[str, tuple[str, ...]] = {
    f"{method}-{cut}2": (*METHODS[method], *MEGATRON_ACTOR, f"{ACTOR}.megatron.{size}=2")
    for method in ("grpo", "ppo")
    for cut, size in (("tp", "tensor_model_parallel_size"), ("pp", "pipeline_model_parallel_size"))
}
HEADS = ("--num_attention_heads=3", "--num_key_value_heads=1")  # of 32 numbers: on CPU vLLM has attention for no smaller ones
Curve = list[tuple[int, float]]


def warm_up(folder: Path, seed: int, *shape: str, sft: Sequence[str] = ()) -> Path:
    """Write the data if it does not exist, and this seed's model; return the model's path.

    shape: arguments of data_preprocess.tiny_model. sft: overrides of the warm start.
    """
    if not (folder / "train.parquet").exists():
        run("data_preprocess.sort_digits", f"--local_save_dir={folder}")
    run("data_preprocess.tiny_model", f"--save_dir={folder}/base-{seed}", f"--seed={seed}", *shape)
    run(
        "trainer.main_sft", "recipe=sort_digits", f"trainer.seed={seed}", f"data.train_files={folder}/sft.parquet",
        f"model.path={folder}/base-{seed}", f"trainer.export_dir={folder}/warm-{seed}",
        f"trainer.default_local_dir={folder}/sft-{seed}", *sft,
    )  # fmt: skip
    return folder / f"warm-{seed}"


def learn(warm: Path, run_dir: Path, seed: int, overrides: Sequence[str], steps: int = STEPS) -> Curve:
    """(step, held-out greedy accuracy) of a run."""
    run(
        "trainer.main_ppo", "recipe=quickstart", f"trainer.seed={seed}", f"data.train_files={warm.parent}/train.parquet",
        f"data.val_files={warm.parent}/test.parquet", f"actor_rollout_ref.model.path={warm}", f"critic.model.path={warm}",
        f"trainer.default_local_dir={run_dir}", "trainer.logger=[]", f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={TEST_FREQ}", "reward.num_workers=1", *overrides,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(int(line["training/global_step"]), line["val/accuracy"]) for line in lines if "val/accuracy" in line]


def run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL)


def rise(curves: Sequence[Curve]) -> float:
    """Last accuracy less the first, median over seeds."""
    return statistics.median(curve[-1][1] - curve[0][1] for curve in curves)


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw one panel per method: each seed as a thin line, their median as a thick one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 * len(curves), 2.6), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for panel, (method, of_seeds) in zip(panels, curves.items(), strict=True):
        steps = [step for step, _ in of_seeds[0]]
        for curve in of_seeds:
            panel.plot(steps, [accuracy for _, accuracy in curve], color="#9db4d8", linewidth=1)
        middle = [statistics.median(curve[i][1] for curve in of_seeds) for i in range(len(steps))]
        panel.plot(steps, middle, color="#1f4e9c", linewidth=2.2)
        panel.set_title(f"{method}  +{rise(of_seeds):.2f}", fontsize=10)
        panel.set(xlim=(0, steps[-1]), ylim=(0, 1))
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy")
    figure.supxlabel("step", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="each on the embedded engine")
    choice.add_argument("--engines", nargs="+", choices=list(ENGINES), help="GRPO on each")
    choice.add_argument("--megatron", nargs="+", choices=list(MEGATRON), help="two workers with one model")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    shape = HEADS if arguments.engines else ()
    ways, steps = METHODS, STEPS
    if arguments.engines:
        ways, steps = ENGINES, ENGINE_STEPS
    if arguments.megatron:
        ways, steps = MEGATRON, MEGATRON_STEPS
    with tempfile.TemporaryDirectory() as folder:
        warm = {seed: warm_up(Path(folder), seed, *shape) for seed in arguments.seeds}
        curves: dict[str, list[Curve]] = {}
        for way in arguments.engines or arguments.megatron or arguments.methods:
            curves[way] = [learn(model, Path(folder) / f"{way}-{seed}", seed, ways[way], steps) for seed, model in warm.items()]
            first_last = [f"{curve[0][1]:.2f} -> {curve[-1][1]:.2f}" for curve in curves[way]]
            print(f"{way}: {', '.join(first_last)}; median rise {rise(curves[way]):.2f}", file=sys.stderr, flush=True)
    print(json.dumps(curves))
    if arguments.picture is not None:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
