"""Run the engine comparison: measure each engine, print a table, write JSON and a page, check the bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from configs.base.locks import locked
from configs.schema.parity import ParityConfig
from trainer.cluster.launch import open_backend, start_workers
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.data.dataset import PromptDataset
from trainer.data.files import value_of
from trainer.parity.agreement import Heads, agreement, choices, differences, draw_z, ends, heads, length_figures
from trainer.parity.bounds import Engine, Pass, broken, coarser, margin
from trainer.parity.measure import Measured, ParityTask, Timed, measure
from trainer.parity.parity_report import Parity, page, table
from trainer.rollout.rollout_builder import rollout_spec, sampling
from trainer.run.errors import CheckFailed
from trainer.run.run_dir import redact, write_atomic
from trainer.tracking.formatting import table_console
from trainer.tracking.tracker import environment
from workers.controller.logs import announce
from workers.roles.rollout_engines import check_installed
from workers.roles.train_engines import check_engine

JSON, PAGE = "parity.json", "parity.html"


def run(config: ParityConfig, notices: Sequence[str]) -> None:
    """Measure the engines one after the other, each in its own workers, and report. notices: warnings about the configuration.

    Raises CheckFailed with a line for each exceeded bound.
    """
    for engine in config.engines:
        check_installed(engine)
    models, data = config.actor_rollout_ref, config.data
    check_engine("actor_rollout_ref.actor", models.actor, models.model, "lm", config.trainer.device)
    tokenizer = load_tokenizer(models.model)
    prompts = PromptDataset(data.files, tokenizer, data, max_samples=data.max_samples, seed=config.trainer.seed, scored=False)
    announce(prompts.notices)
    task = ParityTask(
        prompts=[prompts[index] for index in range(len(prompts))],
        sampling=sampling(models.rollout, tokenizer, models.model, data),
        n=models.rollout.n if models.rollout.do_sample else 0,
        sharding=models.actor.sharding,
        seed=config.trainer.seed,
    )
    directory = Path(config.trainer.default_local_dir)
    measured: dict[str, Measured] = {}
    with (
        locked(directory, "trainer.default_local_dir"),
        open_backend(config.trainer, config.ray_kwargs, config.timeouts, directory) as backend,
    ):
        for engine in config.engines:
            # New workers for each engine, so that memory is measured without the others.
            print(f"{engine}: {len(prompts)} prompts")
            workers = start_workers(backend, config.trainer, config.timeouts)
            spec = rollout_spec(models.model, models.rollout_of(engine), data, config.trainer.device)
            measured[engine] = measure(workers, spec, task, Watchdog(asdict(config.timeouts), directory))
            workers.shutdown()
    report(config, compared(config, tokenizer, prompts, task, measured), measured, directory)


def compared(
    config: ParityConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    task: ParityTask,
    measured: Mapping[str, Measured],
) -> Parity:
    """Compute all results and exceeded bounds from the measurements."""
    dtype = coarser([config.actor_rollout_ref.rollout.dtype, config.actor_rollout_ref.actor.sharding.dtype])
    engines = {name: figures(config, tokenizer, task, of_engine, measured) for name, of_engine in measured.items()}
    begun = heads_of(tokenizer, prompts, config.data.prompt_key)
    return Parity(
        model=config.actor_rollout_ref.model.path,
        dtype=dtype,
        prompts=len(prompts),
        temperature=task.sampling.temperature if task.n else None,
        margin=margin(config.bounds, dtype),
        heads=begun,
        engines=engines,
        broken=broken(engines, begun, config.bounds, dtype),
    )


def figures(
    config: ParityConfig, tokenizer: PreTrainedTokenizerBase, task: ParityTask, own: Measured, measured: Mapping[str, Measured]
) -> Engine:
    """Results of the engine measured in ``own``, compared with the trainer and with the first engine in ``measured``."""
    first = measured[config.engines[0]]
    rollout = config.actor_rollout_ref.rollout
    dtype = coarser([rollout.dtype, config.actor_rollout_ref.actor.sharding.dtype])
    stops = () if rollout.ignore_eos else task.sampling.stop_token_ids

    def of_pass(timed: Timed, reference: Timed | None) -> Pass:
        answers = timed.answers
        return Pass(
            answers=len(answers.lengths),
            tokens=len(answers.token_ids),
            tokens_per_second=len(answers.token_ids) / timed.seconds,
            cached=timed.cached,
            lengths=length_figures(answers.lengths),
            differences=differences(answers),
            ends=ends(answers, stops, tokenizer.all_special_ids),
            agreement=agreement(reference.answers, answers) if reference is not None and own is not first else None,
        )

    uncut = rollout.top_k == -1 and rollout.top_p == 1.0
    return Engine(
        greedy=of_pass(own.greedy, first.greedy),
        choices=choices(own.greedy.answers, margin(config.bounds, dtype)),
        sampled=of_pass(own.sampled, first.sampled) if own.sampled is not None else None,
        draw_z=draw_z(own.sampled.answers) if own.sampled is not None and uncut else None,
        start_seconds=own.start_seconds,
        sync_seconds=own.sync_seconds,
        memory_without_bytes=own.memory_without_bytes,
        memory_with_bytes=own.memory_with_bytes,
    )


def heads_of(tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset, prompt_key: str) -> Heads:
    """Check BOS tokens: a chat should begin with BOS if its template writes one, a plain text if the tokenizer adds one."""
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if bos is None:
        return heads(None, None, [], [])
    puts_one = tokenizer("")["input_ids"][:1] == [bos_id]
    asked = [prompts[index] for index in range(len(prompts))]
    plain = [isinstance(value_of(prompts.row(index), prompt_key), str) for index in range(len(prompts))]
    wanted = [puts_one if is_plain else prompt.text.startswith(bos) for prompt, is_plain in zip(asked, plain, strict=True)]
    return heads(bos, bos_id, [prompt.prompt_ids for prompt in asked], wanted)


def report(config: ParityConfig, parity: Parity, measured: Mapping[str, Measured], directory: Path) -> None:
    """Write JSON and page, print the table. Raises CheckFailed if a bound is exceeded."""
    plain_config = redact(asdict(config))
    versions = environment()
    found = asdict(parity) | {"config": plain_config, "environment": versions}
    write_atomic(directory / JSON, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_atomic(directory / PAGE, page(parity, measured, plain_config, versions))
    table_console().print(table(parity))
    print(f"report: {directory / PAGE}")
    print(f"figures: {directory / JSON}")
    # Last: table, page and figures exist also where a bound is exceeded.
    if parity.broken:
        raise CheckFailed("\n".join(parity.broken))
