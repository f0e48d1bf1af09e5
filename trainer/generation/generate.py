"""Generate responses to a data set in resumable shards, and select training data from them.

A shard is complete or absent, and the manifest records every setting that influences responses. A repeated call generates only
the missing shards; selection reads all of them. Responses do not depend on the order in which shards are generated: each one's
seed is a function of prompt and sample.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from configs.base.locks import locked
from configs.reward_models import reward_models
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import ModelScoringConfig, wants_truth
from configs.validation.rollout import engine_ranks
from trainer.checkpoint.training_data import content_of
from trainer.cluster.launch import opened_workers
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.data.dataset import PromptDataset
from trainer.generation.generator import Generator
from trainer.generation.shards import CONTENT, SCORED, Row, Shards, unavailable, write_rows
from trainer.rewards.models.reward_builder import check_reward_models, start_reward_models
from trainer.rewards.remote.remote_rewards import needs_data_sources, open_rewards
from trainer.rewards.rules.reward_registry import check_data_sources, may_ask_judge
from trainer.rollout.rollout_builder import rollout_spec, sampling, start_engine
from trainer.run.run_dir import leaves
from workers.controller.logs import announce
from workers.engine.hf.hf_model import vocab_size
from workers.roles.rollout_engines import check_installed
from workers.roles.train_engines import check_adapter, check_shared_heads

# Keys that cannot change a response. All others must be unchanged for a run to resume.
MAY_CHANGE = (
    "data.path",  # the prompts are hashed instead, so files may be moved
    "data.output_path",
    "data.filter_overlong_prompts_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.verify_weights",
    "reward.num_workers",
    *(f"reward.remote.{name}" for name in ("batch_size", "concurrency", "timeout", "retries", "backoff", "token_env")),
)


def run(config: GenerationConfig, notices: Sequence[str]) -> None:
    """Check the configuration, generate missing shards, then select. notices: warnings about the configuration."""
    check_installed(config.actor_rollout_ref.rollout.name)
    check_adapter("actor_rollout_ref", config.actor_rollout_ref.model, "lm")
    ranks = engine_ranks(config.actor_rollout_ref.rollout)
    check_shared_heads("actor_rollout_ref.rollout.tensor_model_parallel_size", ranks, config.actor_rollout_ref.model, "lm")
    data, selection = config.data, config.selection
    scored = selection.score or any(file is not None for file in (selection.best_of_n, selection.sft, selection.preferences))
    if scored:
        check_reward_models(config.reward, config.trainer)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    by_rules = scored and wants_truth(config.reward)
    prompts = PromptDataset(data.path, tokenizer, data, max_samples=data.max_samples, seed=config.trainer.seed, scored=by_rules)
    prompts.check_tokens(vocab_size(config.actor_rollout_ref.model))
    if scored and needs_data_sources(config.reward):
        check_data_sources(prompts.data_sources)
    announce(prompts.notices)
    with locked(Path(data.output_path), "data.output_path"):
        complete(config, prompts, tokenizer, scored=scored)


def complete(config: GenerationConfig, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, *, scored: bool) -> None:
    """Generate missing shards, then select. scored: responses are scored."""
    data = config.data
    total = -(-len(prompts) // data.batch_size)
    shards = Shards(Path(data.output_path), data.output_format, total, manifest(config, prompts, scored=scored))
    missing = shards.missing()
    if scored and not is_repeatable(config.reward) and (failed := shards.failed()):
        print(f"no server was available for some rewards of {len(failed)} shards: these shards are generated again")
        missing = sorted([*missing, *failed])
    if missing:
        if len(missing) < total:
            print(f"resumed: {total - len(missing)} of {total} shards are there")
        with ExitStack() as stack:
            # Scoring processes start first and get ready while the engine loads.
            rewards = stack.enter_context(open_rewards(config.reward)) if scored else None
            if rewards is not None:
                rewards.start()
            watchdog = Watchdog(asdict(config.timeouts), Path(config.trainer.default_local_dir))
            workers = stack.enter_context(opened_workers(config))
            on = (workers, config.trainer, config.trainer, watchdog, tokenizer, data.apply_chat_template_kwargs)
            models = start_reward_models(config.reward, *on) if scored else None
            spec = rollout_spec(config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, data, config.trainer.device)
            rollout = start_engine(workers, spec, watchdog, seed=config.trainer.seed)
            generator = Generator(
                prompts,
                rollout,
                tokenizer,
                rewards,
                models,
                watchdog,
                prompt_key=data.prompt_key,
                n=config.actor_rollout_ref.rollout.n,
                sampling=sampling(config.actor_rollout_ref.rollout, tokenizer, config.actor_rollout_ref.model, data),
                seed=config.trainer.seed,
            )
            if rewards is not None:
                rewards.wait_ready()
            generate(generator, shards, missing, data.batch_size, repeatable=is_repeatable(config.reward))
    print(f"answers: {shards.directory} ({len(prompts)} prompts, {config.actor_rollout_ref.rollout.n} answers each)")
    select(config, shards)


def generate(generator: Generator, shards: Shards, missing: Sequence[int], batch_size: int, *, repeatable: bool) -> None:
    """Generate and write each missing shard; prints a line per shard, and a progress bar on a terminal.

    repeatable: see check_scores.
    """
    console = Console()
    columns = (TextColumn("shards"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=shards.total, completed=shards.total - len(missing))
        for index in missing:
            started = time.perf_counter()
            first = index * batch_size
            # Shards are written as they are complete: a killed run loses one at most.
            rows = generator.rows(range(first, min(first + batch_size, len(generator.data))))
            if shards.path(index).exists() and unavailable(rows) >= shards.failures(index):
                print(
                    f"note: shard {index} is kept: again no server was available for {unavailable(rows)} rewards", file=sys.stderr
                )
                progress.advance(bar)
                continue
            check_scores(rows, shards, index, repeatable=repeatable)
            write_rows(shards.path(index), rows)
            seconds = time.perf_counter() - started
            console.print(shard_line(rows, index, shards.total, seconds), highlight=False, soft_wrap=True)
            progress.advance(bar)


def is_repeatable(reward: ModelScoringConfig) -> bool:
    """Whether a response that has no score would have none in the next run either: without servers, which may be down."""
    by_servers = bool(reward.remote_urls) or may_ask_judge(reward)
    return not by_servers and not any(model.urls for model in reward_models(reward).values())


def check_scores(rows: Sequence[Row], shards: Shards, index: int, *, repeatable: bool) -> None:
    """Raise ValueError, with the first error, if all rewards of a shard failed.

    repeatable: they would fail again. Then the shard is kept if another one has scores: its prompts may be those that the reward
    fails for, and the program would end here at every restart.
    """
    scores = [score for row in rows for score in row.get("scores", ())]
    if not scores or any(score is not None for score in scores):
        return
    errors = [error for row in rows for error in row["reward_errors"]]
    words = f"all {len(scores)} rewards of shard {index} failed; the first: {errors[0]}"
    if not repeatable or not any(score is not None for row in shards.rows() for score in row["scores"]):
        raise ValueError(words)
    print(f"note: {words}", file=sys.stderr)


def shard_line(rows: Sequence[Row], index: int, total: int, seconds: float) -> str:
    """Console line of a shard: ``shard  3/10  answers 1,024  length 7.0  cut 0.02  score 0.531  tok/s 812``.

    length: mean tokens per response. cut: share of truncated responses. score: mean over responses with a score. failed: number
    of responses without one, if there are any.
    """
    lengths = [length for row in rows for length in row["lengths"]]
    cut = sum(reason != "stop" for row in rows for reason in row["finish_reasons"]) / len(lengths)
    every = [score for row in rows for score in row.get("scores", ())]
    scores = [score for score in every if score is not None]
    score = f"  score {sum(scores) / len(scores):.3f}" if scores else ""
    score += f"  failed {len(every) - len(scores)}" if len(scores) < len(every) else ""
    return (
        f"shard {index + 1:>{len(str(total))}}/{total}  answers {len(lengths):,}  length {sum(lengths) / len(lengths):.1f}  "
        f"cut {cut:.2f}{score}  tok/s {sum(lengths) / seconds:,.0f}"
    )


def select(config: GenerationConfig, shards: Shards) -> None:
    """Write the files of selection.* from all shards. Raises ValueError if a selection is empty."""
    selection = config.selection
    if selection.best_of_n is not None:
        best = [row for row in map(best_of_n, shards.rows()) if row is not None]
        if not best:
            raise ValueError(f"selection.best_of_n={selection.best_of_n}: no answer has a score")
        write_rows(Path(selection.best_of_n), best)
        mean = sum(row["scores"][0] for row in best) / len(best)
        print(f"best of {config.actor_rollout_ref.rollout.n}: {selection.best_of_n} ({len(best)} prompts, mean score {mean:.3f})")
    if selection.sft is not None:
        kept = [accepted(row, selection.min_score, selection.max_per_prompt) for row in shards.rows()]
        learned = [row for rows in kept for row in rows]
        if not learned:
            bound = f"selection.min_score={selection.min_score}"
            raise ValueError(f"selection.sft={selection.sft}: no answer that ended by itself has a score of {bound}")
        write_rows(Path(selection.sft), learned)
        print(f"accepted: {selection.sft} ({len(learned)} answers to {sum(map(bool, kept))} of {len(kept)} prompts)")
    if selection.preferences is not None:
        compared = [pair for row in shards.rows() for pair in pairs(row, selection.max_per_prompt)]
        if not compared:
            raise ValueError(f"selection.preferences={selection.preferences}: no prompt has two answers with different scores")
        write_rows(Path(selection.preferences), compared)
        print(f"preferences: {selection.preferences} ({len(compared)} pairs)")


def manifest(config: GenerationConfig, prompts: PromptDataset, *, scored: bool) -> dict[str, Any]:
    """{dotted key: value} of all settings that influence responses, and a hash of the prompts that are read."""
    parts: dict[str, Any] = {"data": asdict(config.data), "actor_rollout_ref": asdict(config.actor_rollout_ref)}
    parts |= {"reward": asdict(config.reward)} if scored else {}
    # Prompts are hashed as they are tokenised, so a different tokenizer or chat template is detected too; ground truths only if
    # they can influence scores.
    digest = hashlib.blake2b(digest_size=16)
    for index in range(len(prompts)):
        prompt = prompts[index]
        judged = (prompt.ground_truth, prompt.extra_info) if scored else ()
        digest.update(repr((prompt.uid, prompt.prompt_ids, *judged)).encode())
    decided = {key: value for key, value in leaves(parts).items() if key not in MAY_CHANGE}
    # A model may be replaced by another one at the same path.
    paths = {key: value for key, value in decided.items() if key.endswith("path") and isinstance(value, str)}
    decided |= {f"{key}{CONTENT}": content_of_model(Path(value)) for key, value in paths.items() if Path(value).is_dir()}
    return decided | {"trainer.seed": config.trainer.seed, SCORED: scored, "prompts": digest.hexdigest()}


CONTENTS = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")


def content_of_model(directory: Path) -> str:
    """Hash of a model's files. Weights that were trained differ in nearly all blocks that it reads."""
    return content_of(sorted(path for path in directory.iterdir() if path.is_file() and path.suffix in CONTENTS))


LISTS = ("responses", "log_probs", "lengths", "finish_reasons", "scores", "reward_errors", "score_parts")


def best_of_n(row: Row) -> Row | None:
    """The row with only its highest-scoring response; ties go to the first. None if every reward failed."""
    ranked = by_score(row)
    return None if not ranked else row | {name: [row[name][ranked[0]]] for name in LISTS if name in row}


def accepted(row: Row, min_score: float | None, most: int) -> list[Row]:
    """Rejection sampling: at most ``most`` rows {prompt, response} for SFT (Yuan et al. 2023, arXiv:2308.01825).

    Takes distinct terminated responses with a score of at least ``min_score`` (None: any), best first. Truncated responses are
    excluded: they would teach the model to stop anywhere.
    """
    enough = [text for text, score in ended(row).items() if min_score is None or score >= min_score]
    return [{"prompt": row["prompt"], "response": text} for text in enough[:most]]


def pairs(row: Row, most: int) -> list[Row]:
    """Preference pairs: at most ``most`` rows {prompt, chosen, rejected} for trainer.main_reward_model and main_dpo.

    Both are distinct terminated responses, the chosen one with the higher score. The best response is paired with each worse one
    first, then the second best, and further on.
    """
    # Ordered best first, so the first of each combination never scores less than the second; ties are no preference.
    scores = ended(row)
    found = [(better, worse) for better, worse in combinations(scores, 2) if scores[better] > scores[worse]]
    return [{"prompt": row["prompt"], "chosen": better, "rejected": worse} for better, worse in found[:most]]


def ended(row: Row) -> dict[str, float]:
    """{text: score} of distinct terminated responses that have a score, best first."""
    scores: dict[str, float] = {}
    for i in by_score(row):
        if row["finish_reasons"][i] == "stop":
            scores.setdefault(row["responses"][i], row["scores"][i])
    return scores


def by_score(row: Row) -> list[int]:
    """Indices of the responses that have a score, best first; ties in order of generation."""
    scores = row["scores"]
    return sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
