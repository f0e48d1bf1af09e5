"""GRPO steps of TRL, for scripts/bench/compare.py: its GRPOTrainer, with generation by transformers.

    <python of the environment that install.sh trl made> -P trl.py --task task.json --out out.json [name=value ...]

(-P: or this file would be the trl that is imported.) name=value are options of GRPOConfig; tried, and no faster on two cores:
optim="adamw_torch_fused", cache_implementation="static". Tokens are counted in what the trainer learns from, updates where the
optimizer steps; seconds are from the end of a step to that of the next.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TOKENS_AT_ONCE = 2048  # of a micro-batch, at least: measured, a batch of 20k tokens takes 5 % less CPU in eight parts than in one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="what to do, as scripts/bench/compare.py writes it")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args, options = parser.parse_known_args()
    task, started = json.loads(args.task.read_text()), time.perf_counter()
    chosen = {name: json.loads(value) for name, value in (option.split("=", 1) for option in options)}
    torch.set_num_threads(task["threads"])
    trainer = make_trainer(task, chosen, args.out.parent / "trl")
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    measured = slice(task["warmup"], None)
    (dtype,) = {str(parameter.dtype).removeprefix("torch.") for parameter in trainer.model.parameters()}
    report = {
        "rival": "trl",
        "version": version("trl"),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "steps": [clock.step(i, made) for i, made in enumerate(trainer.made)][measured],
        "startup_s": clock.began - started,
        "settings": {**chosen, "micro_batches": trainer.args.gradient_accumulation_steps},
        "load": os.getloadavg(),
    }
    args.out.write_text(json.dumps(report, indent=1))


def make_trainer(task: dict[str, Any], options: dict[str, Any], folder: Path) -> "CountingTrainer":
    rows, longest = task["prompts"] * task["n"], task["prompt_length"] + task["response_length"]
    micro_batches = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or rows // n * longest >= TOKENS_AT_ONCE))
    fixed: dict[str, Any] = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=rows // micro_batches,
        gradient_accumulation_steps=micro_batches,  # one update a batch: TRL then takes its own log-probs for the old ones
        num_generations=task["n"],
        max_completion_length=task["response_length"],
        max_steps=task["warmup"] + task["steps"],
        shuffle_dataset=False,
        beta=task["kl_coef"],
        loss_type="dapo",  # a mean over the batch's tokens
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        temperature=1.0,
        generation_kwargs=None if task["lengths"] else {"min_new_tokens": task["response_length"]},
        logging_steps=1,  # as Tandem does
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = CountingTrainer(
        model=task["model"],
        args=GRPOConfig(**fixed | options),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        reward_funcs=reward_of(Path(task["reward"])),
        train_dataset=prompts_of(Path(task["train"])),
    )
    if task["lengths"] is not None:
        forced = ForcedLengths(json.loads(Path(task["lengths"]).read_text()), trainer.eos_token_ids[0])
        trainer.model.generate = with_lengths(trainer.model.generate, forced)
    return trainer


def prompts_of(path: Path) -> Dataset:
    return Dataset.from_list([{"prompt": messages[0]["content"]} for messages in pq.read_table(path)["prompt"].to_pylist()])


def reward_of(path: Path) -> Callable[..., list[float]]:
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [module.compute_score("bench", text, "") for text in completions]

    return reward


class CountingTrainer(GRPOTrainer):
    """GRPOTrainer that records the tokens and the phase times of each batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.made: list[dict[str, Any]] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answers = super()._generate_single_turn(*args, **kwargs)
        self.generated_in = time.perf_counter() - began
        return answers

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        phases = {"gen": self.generated_in, "ref_and_reward": time.perf_counter() - began - self.generated_in}
        prompt_tokens, response_tokens = int(batch["prompt_mask"].sum()), int(batch["completion_mask"].sum())
        self.made.append({"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "phases": phases})
        return batch


class Clock(TrainerCallback):
    """Records wall and CPU seconds at the end of each step, and the number of optimizer steps until then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float, int]] = []
        self.updates = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()
        self.ends.append((self.began, time.process_time(), 0))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updates += 1

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if len(self.ends) == state.global_step:  # not the summary after the last step
            self.ends.append((time.perf_counter(), time.process_time(), self.updates))

    def step(self, i: int, made: dict[str, Any]) -> dict[str, Any]:
        wall, cpu, updates = (after - before for before, after in zip(self.ends[i], self.ends[i + 1], strict=True))
        phases = made["phases"] | {"update_actor": wall - sum(made["phases"].values())}
        return {**made, "wall_s": wall, "cpu_s": cpu, "updates": updates, "phases": phases}


class ForcedLengths(LogitsProcessor):
    """Makes the r-th generated row end after exactly lengths[r] tokens."""

    def __init__(self, lengths: list[int], eos: int) -> None:
        self.lengths = lengths
        self.eos = eos
        self.asked = 0

    def begin(self, prompts: torch.Tensor) -> None:
        rows, self.prompt_length = prompts.shape
        self.now = torch.tensor(self.lengths[self.asked : self.asked + rows])
        self.asked += rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        last = self.now == input_ids.shape[1] - self.prompt_length + 1
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos] = 0.0
        return scores


def with_lengths(generate: Callable[..., torch.Tensor], forced: ForcedLengths) -> Callable[..., torch.Tensor]:
    def generated(*, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        forced.begin(input_ids)
        return generate(input_ids=input_ids, logits_processor=[forced], **kwargs)

    return generated


if __name__ == "__main__":
    main()
