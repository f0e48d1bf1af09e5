"""Measure one engine in its own workers: its responses, the trainer's log-probs of them, time and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from configs.schema.common import Sharding
from trainer.cluster.remote import RemoteModel
from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import Prompt
from trainer.parity.agreement import EngineResponses
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.responses import join_responses, prompt_batch
from trainer.rollout.rollout_builder import start_weight_source
from workers.batch import Batch, counts_in
from workers.controller.group import WorkerGroup
from workers.controller.rpc import worker_call
from workers.roles.worker import Worker
from workers.rollout.base import RolloutSpec, Sampling
from workers.seeding import seed_of

OUTPUTS = ("log_probs", "entropy", "top_log_probs")


@dataclass(frozen=True, slots=True)
class ParityTask:
    """Settings shared by all engines. n: sampled responses per prompt; 0: greedy responses only."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    n: int
    sharding: Sharding
    seed: int


@dataclass(frozen=True, slots=True)
class Timed:
    """Responses, seconds of generation, and share of prompt tokens read from a cache (None: not reported)."""

    answers: EngineResponses
    seconds: float
    cached: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one engine; see trainer.parity.bounds.Engine for the fields."""

    greedy: Timed
    sampled: Timed | None
    start_seconds: float
    sync_seconds: float
    memory_without_bytes: int
    memory_with_bytes: int


def measure(workers: WorkerGroup, spec: RolloutSpec, task: ParityTask, watchdog: Watchdog) -> Measured:
    """Start the engine of ``spec`` colocated with the trainer's model, and generate greedy and sampled responses."""
    actor = start_weight_source(workers, spec, watchdog, sharding=task.sharding, seed=task.seed)
    without = memory(workers, watchdog)
    started = time.perf_counter()
    rollout = RemoteRollout(workers, spec, "actor", watchdog)
    made = time.perf_counter()
    rollout.sync_weights(0)
    synced = time.perf_counter()
    asked = [(replace(task.sampling, temperature=0.0), 1)] + ([(task.sampling, task.n)] if task.n else [])
    made_of = [generate(rollout, task, sampling, n) for sampling, n in asked]
    taken = memory(workers, watchdog)  # before the trainer's forward pass, which puts the engine to sleep
    timed = [judged(actor, generated) for generated in made_of]
    return Measured(
        greedy=timed[0],
        sampled=timed[1] if task.n else None,
        start_seconds=made - started,
        sync_seconds=synced - made,
        memory_without_bytes=without,
        memory_with_bytes=taken,
    )


def memory(workers: WorkerGroup, watchdog: Watchdog) -> int:
    """Bytes in use, summed over all workers; see Worker.memory."""
    return sum(watchdog.call(workers, "ask", "memory", worker_call(Worker.memory)))


@dataclass(frozen=True, slots=True)
class Generated:
    """Prompts and responses as sequences, with the cost of generation. batch.meta["temperature"]: for the trainer's log-probs.

    limit: maximum tokens of a response. configs/validation/programs.py ensures that prompt and response fit max_model_len.
    """

    batch: Batch
    limit: int
    seconds: float
    cached: float | None


def generate(rollout: RemoteRollout, task: ParityTask, sampling: Sampling, n: int) -> Generated:
    """Generate ``n`` responses per prompt; each is seeded by (seed, uid, sample) alone, so all engines get the same seeds."""
    prompts = [prompt for prompt in task.prompts for _ in range(n)]
    seeds = [seed_of(task.seed, "parity", prompt.uid, sample) for prompt in task.prompts for sample in range(n)]
    questions = prompt_batch(prompts, seeds, greedy=torch.zeros(len(prompts), dtype=torch.bool))
    rollout.stats()  # counters are reset when they are read
    started = time.perf_counter()
    answers = rollout.generate(questions, sampling, n)
    seconds = time.perf_counter() - started
    stats = rollout.stats()
    # The engine reports log-probs of a greedy response at temperature 1 (see Completion).
    temperature = sampling.temperature or 1.0
    batch = join_responses(questions, answers).with_rows(
        uid=torch.tensor([prompt.uid for prompt in prompts]), group=torch.arange(len(task.prompts)).repeat_interleave(n)
    )
    return Generated(
        batch=batch.with_meta({"temperature": temperature}),
        limit=sampling.max_tokens,
        seconds=seconds,
        cached=stats["cached_tokens"] / stats["prompt_tokens"] if "cached_tokens" in stats else None,
    )


def judged(actor: RemoteModel, generated: Generated) -> Timed:
    """Add the trainer's log-probs, entropy and two largest log-probs at the response tokens."""
    batch = generated.batch
    own = actor.forward(batch, OUTPUTS)
    written = batch.tokens["response_mask"].bool()

    def column(values: torch.Tensor) -> np.ndarray:
        return values[written].numpy()

    found = {name: column(own.tokens[name].double()) for name in OUTPUTS}
    answers = EngineResponses(
        uids=batch.rows["uid"].numpy(),
        lengths=counts_in(batch.tokens["response_mask"], batch.lengths).numpy(),
        limit=generated.limit,
        finished=batch.rows["finished"].bool().numpy(),
        token_ids=column(batch.tokens["input_ids"]),
        log_probs=column(batch.tokens["rollout_log_probs"].double()),
        trainer_log_probs=found["log_probs"],
        entropy=found["entropy"],
        top_log_probs=found["top_log_probs"],
    )
    return Timed(answers, generated.seconds, generated.cached)
