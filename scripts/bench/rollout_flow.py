"""Simulated time of synchronous steps, of partial rollouts, and of dynamic sampling with rounds that begin early.

    python scripts/bench/rollout_flow.py                  # JSON on stdout
    python scripts/bench/rollout_flow.py --kept_share 0.5 # dynamic sampling that keeps half of the groups
    python scripts/bench/rollout_flow.py --sweep          # also a table over max_age and oversubmit, on stderr too
    python scripts/bench/rollout_flow.py --replicas 4 --prompts 256 --train 10

Sampler, policies, buffer, scheduler and flow are the trainer's own; only the engines are simulated. A decode step of an engine
with n running sequences costs a + b * n seconds of simulated time, at most ``slots`` run and the others wait in order. Prefill
costs c seconds per token: the prompt once per group and weight version, and what resubmitted responses have so far; a step in
which requests enter costs d more, for example because vLLM leaves its CUDA graph of decode steps (4 ms on an H200). Response
lengths are geometric with a mean of an eighth of the maximum, where they are truncated, and fixed by ordinal and sample: both
modes sample the same responses, and an interruption changes none. Replicas wait for each other after every tick, so a tick takes
the time of the slowest. The controller, scoring and weight sync cost nothing; ``train`` is added to every step of both modes.

The defaults of a, b and c are assumptions, about those of a 0.5B model on an H200: replace them by measured values.

rounds: dynamic sampling on one replica. ratio: steps per second with rounds that begin early (rollout.balance=tokens) over rounds
that begin when the one before has been scored (static). wasted_tokens: share of tokens in rounds that a step did not need.

ratio: steps per second of partial rollouts over synchronous ones. running: mean number of running sequences during generation,
over the target: the slots of all replicas, or all responses of the groups that oversubmit allows if they are fewer. age: of
groups when a step takes them, in steps. oldest_unfinished: age of the oldest unfinished group at the end of a step; less than
max_age. groups_in_flight: after the first and after the last measured step.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil, log, log1p
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch

from configs.compose import compose
from configs.schema.ppo import FilterGroupsConfig, PPOConfig, RewardConfig
from trainer.cluster.watchdog import StartedCall, Watchdog
from trainer.data.dataset import Prompt, PromptStream
from trainer.data.order import DataOrder
from trainer.planner.simulation import DecodeSlots
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.scoring import Failures, Response, Score
from trainer.rewards.shaping import RunningMoments, Shaping
from trainer.rollout.ahead import RolloutsAhead, SyncSchedule
from trainer.rollout.buffer import GroupBuffer
from trainer.rollout.partial import FilteredPartialRollouts, PartialRollouts
from trainer.rollout.policies import FilteredRounds, OneRound
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.sampler import BatchPolicy, Sampler
from trainer.rollout.scheduler import Balance
from trainer.run.events import Events
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.controller.group import Backend, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.rollout.base import Sampling
from workers.seeding import seed_of

R = TypeVar("R")
Mode = Literal["one round", "rounds", "partial", "partial, filtered", "ahead"]
MAX_AGES, OVERSUBMITS = (1, 2, 3, 4, 6, 8), (1.0, 1.5, 2.0)  # of the sweep


@dataclass(frozen=True, slots=True)
class Settings:
    """A simulated run. a, b, c, d, train: seconds. Lengths in tokens. The others: see --help. decode: (running sequences,
    seconds) of measured decode steps in ascending order, linear between them, instead of a + b * n; empty: a + b * n.
    """

    prompts: int
    n: int
    prompt_tokens: int
    max_tokens: int
    slots: int
    replicas: int
    oversubmit: float
    max_age: int
    a: float
    b: float
    c: float
    train: float
    steps: int
    warm_up: int
    kept_share: float = 0.5
    d: float = 0.0
    max_staleness: int = 2
    decode: tuple[tuple[int, float], ...] = ()

    def decode_seconds(self, running: int) -> float:
        """Seconds of a decode step of ``running`` sequences."""
        return float(np.interp(running, *zip(*self.decode, strict=True))) if self.decode else self.a + self.b * running

    def response_length(self, ordinal: int, sample: int) -> int:
        """Length of a response before truncation, geometric with mean max_tokens / 8."""
        uniform = (seed_of("length", ordinal, sample) + 1) / 2**63
        return max(1, ceil(log(uniform) / log1p(-8 / self.max_tokens)))

    def running_target(self, groups: float) -> int:
        """Number of running sequences with full slots, or of all responses of ``groups`` groups if they are fewer."""
        return min(self.slots * self.replicas, round(groups) * self.n)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request in an engine. left: tokens until its response ends, which is truncated unless ``finished``."""

    id: int
    ordinal: int
    prompt_tokens: int
    begun: int
    left: int
    finished: bool


class SimulatedEngine:
    """Rollout role in simulated time, from one end of a response to the next. Prompts begin with their ordinal."""

    def __init__(self, info: WorkerInfo, settings: Settings) -> None:
        self.rank, self.roles = info.rank, {"rollout": self}
        self._settings = settings
        self._version = 0
        self._now = 0
        """Number of decode steps so far."""
        self._slots = DecodeSlots(1, settings.slots)
        self._unfinished: dict[int, SimulatedRequest] = {}
        """Unfinished requests by id, in the order in which they came."""
        self._cached: set[int] = set()
        """Ordinals of the prompts computed with these weights."""

    def close(self) -> None:
        """Nothing to release."""

    def build_rollout(self, role: str, spec: object, source: str) -> tuple[int, bool]:
        return self.rank, True

    def sync_weights(self, version: int, keep_cache: bool = False) -> dict[str, Any]:
        self._version = version
        self._cached.clear()
        return {}

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        """As RolloutRole.advance. meta: seconds; sequence_seconds, the sum of the running sequences' seconds."""
        if prompts is not None:
            for request in self._requests(prompts):
                self._unfinished[request.id] = request
                self._slots.submit(0, request.id, request.left)
        ended: list[SimulatedRequest] = []
        seconds = sequence_seconds = 0.0
        end = self._now + steps
        while self._now < end and self._unfinished:
            started = self._slots.fill(0, self._now)
            elapsed = self._settings.c * self._prefilled(started) + self._settings.d * bool(started)
            running, next_end = self._slots.running[0], self._slots.next_end
            assert next_end is not None, "free slots are filled"
            until = min(end, next_end)
            elapsed += (until - self._now) * self._settings.decode_seconds(running)
            seconds, sequence_seconds = seconds + elapsed, sequence_seconds + elapsed * running
            self._now = until
            while self._slots.next_end == until:
                ended.append(self._unfinished.pop(self._slots.pop()[2]))
        responses = self._responses(ended, [request.left for request in ended])
        return responses.with_meta({"seconds": seconds, "sequence_seconds": sequence_seconds})

    def suspend(self) -> Batch:
        """As RolloutRole.suspend, with the meta of ``advance``: it takes no time."""
        ends = self._slots.take()
        requests = [*self._unfinished.values()]
        sampled = {id: self._unfinished[id].left - (end - self._now) for id, end in ends.items()}
        self._unfinished = {}
        responses = self._responses(requests, [sampled.get(request.id, 0) for request in requests])
        responses = responses.with_rows(ended=torch.zeros(len(requests), dtype=torch.bool))
        return responses.with_meta({"seconds": 0.0, "sequence_seconds": 0.0})

    def _requests(self, prompts: Batch) -> list[SimulatedRequest]:
        begun = prompts.rows.get("begun", torch.zeros_like(prompts.lengths))
        firsts = prompts.tokens["input_ids"][prompts.offsets[:-1]]
        columns = (prompts.rows["id"], firsts, prompts.lengths - begun, begun)
        requests, longest = [], self._settings.max_tokens
        for id, ordinal, prompt_tokens, tokens in zip(*(column.tolist() for column in columns), strict=True):
            length = self._settings.response_length(ordinal, id % self._settings.n)
            left = min(length, longest) - tokens
            requests.append(SimulatedRequest(id, ordinal, prompt_tokens, tokens, left, length <= longest))
        return requests

    def _prefilled(self, started: Sequence[int]) -> int:
        """Number of tokens to prefill for requests that start."""
        tokens = 0
        for request in (self._unfinished[id] for id in started):
            tokens += request.begun + (0 if request.ordinal in self._cached else request.prompt_tokens)
            self._cached.add(request.ordinal)
        return tokens

    def _responses(self, requests: Sequence[SimulatedRequest], lengths: Sequence[int]) -> Batch:
        total = sum(lengths)
        return Batch(
            lengths=torch.tensor(lengths, dtype=torch.int64),
            tokens={
                "input_ids": torch.zeros(total, dtype=torch.int64),
                "rollout_log_probs": torch.zeros(total),
                "weight_version": torch.full((total,), self._version, dtype=torch.int32),
            },
            rows={
                "id": torch.tensor([request.id for request in requests], dtype=torch.int64),
                "finished": torch.tensor([request.finished for request in requests], dtype=torch.int64),
            },
        )


class SimulatedClock(Watchdog):
    """Simulated time. Replicas that wait for each other after every tick take the time of the slowest; others keep their own."""

    seconds = sequence_seconds = 0.0

    def __init__(self, limits: dict[str, float], folder: Path) -> None:
        super().__init__(limits, folder)
        self._since = Counter[int]()
        """Seconds of each replica since all of them waited for each other."""

    def results(self, calls: Collection[StartedCall[R]], *, every: bool) -> dict[StartedCall[R], R]:
        found = super().results(calls, every=every)
        for call, batch in found.items():
            tick = cast(Batch, batch).meta
            self._since[call.replica] += tick["seconds"]
            self.sequence_seconds += tick["sequence_seconds"]
        if every:
            self.meet()
        return found

    def meet(self) -> None:
        """All replicas wait for the slowest."""
        self.seconds += max(self._since.values(), default=0.0)
        self._since.clear()


class NumberedPrompts:
    """A data set without end whose prompts consist of their own number."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __getitem__(self, row: int) -> Prompt:
        return Prompt(row, (row,) * self._tokens, "", "bench", str(row), {}, "")


class NoText:
    """Tokenizer that decodes every response to an empty text."""

    def batch_decode(self, written: Sequence[object], skip_special_tokens: bool) -> list[str]:
        return [""] * len(written)


class SimulatedRewards:
    """Rewards without delay. In ``kept_share`` of the groups they alternate between 0 and 1, in the others they are all 0."""

    def __init__(self, kept_share: float) -> None:
        self._kept_share = kept_share
        self._kept: dict[int, bool] = {}

    def submit(self, answers: Sequence[Response], keys: Sequence[int]) -> None:
        kept = (seed_of("kept", answer.ground_truth) < self._kept_share * 2**63 for answer in answers)
        self._kept |= zip(keys, kept, strict=True)

    def finish(self, keys: Sequence[int]) -> list[Score]:
        return [Score(float(self._kept.pop(key) and place % 2), {}, None) for place, key in enumerate(keys)]


@cache
def reward_config() -> RewardConfig:
    """The defaults. Cached: composing takes a second."""
    return compose("ppo_trainer", PPOConfig, ()).reward


class Simulation:
    """A run, step by step. buffer: groups in flight, of partial rollouts. mode: how batches are sampled."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        folder: Path,
        mode: Mode,
        *,
        balance: Balance = "tokens",
        engine: tuple[type[SimulatedEngine], *tuple[Any, ...]] = (SimulatedEngine,),
    ) -> None:
        """engine: class of the workers, and its arguments after ``settings``."""
        limits = dict.fromkeys(("start", "generate", "reward", "sync"), 300.0)
        self.clock = SimulatedClock(limits, folder)
        pool = ResourcePool((settings.replicas,), "cpu", "engines")
        worker, *arguments = engine
        group = backend.start_group("engines", pool, worker, settings, *arguments)
        config = SimpleNamespace(name="simulated", free_cache_engine=False, max_num_seqs=settings.slots, balance=balance)
        self.rollout = RemoteRollout(group, cast(Any, SimpleNamespace(rollout=config, run_dir=None)), "actor", self.clock)
        order = DataOrder(2**40 * settings.prompts, settings.prompts, seed=0, shuffle=False)
        self.stream = PromptStream(cast(Any, NumberedPrompts(settings.prompt_tokens)), order)
        self.buffer = GroupBuffer(settings.n, self.stream.prompt)
        filters = FilterGroupsConfig(enable=True, metric=None, max_num_gen_batches=0)
        options: dict[str, Any] = {"oversubmit": settings.oversubmit, "max_age": settings.max_age}
        self.policies: dict[Mode, BatchPolicy] = {
            "one round": OneRound(),
            "rounds": FilteredRounds(filters, settings.prompts),
            "partial": PartialRollouts(self.buffer, groups=settings.prompts, **options),
            "partial, filtered": FilteredPartialRollouts(self.buffer, filters, groups=settings.prompts, **options),
            "ahead": RolloutsAhead(
                self.buffer,
                groups=settings.prompts,
                oversubmit=settings.oversubmit,
                max_staleness=settings.max_staleness,
                schedule=SyncSchedule(),
            ),
        }
        reward = reward_config()
        self.sampler = Sampler(
            self.rollout,
            cast(Any, SimulatedRewards(settings.kept_share)),
            cast(Any, NoText()),
            self.clock,
            n=settings.n,
            sampling=Sampling(1.0, -1, 1.0, max_tokens=settings.max_tokens, stop_token_ids=()),
            seed=0,
            policy=self.policies[mode],
            with_baselines=False,
            reward=reward,
            shaping=Shaping(reward.shaping, RunningMoments()),
            models=None,
            rollbacks=Rollbacks(),
            failures=Failures(Events(folder)),
        )
        self.n_steps = 0

    def step(self) -> Batch:
        """Batch of the next step, sampled with new weights."""
        self.rollout.sync_weights(self.n_steps)
        self.n_steps += 1
        batch = self.sampler.next_batch(self.n_steps, self.stream, Phases())
        self.clock.meet()
        return batch

    def oldest_unfinished(self) -> int:
        """Age of the oldest unfinished group, in steps; 0: there is none."""
        arrays = self.buffer.arrays()
        return max((self.n_steps - arrays["step"])[arrays["tick"] < 0].tolist(), default=0)


def synchronous(settings: Settings, folder: Path, balance: Balance = "tokens") -> dict[str, float]:
    """Figures of synchronous steps; they are independent of each other, so there is no warm-up."""
    with LocalBackend() as backend:
        run = Simulation(settings, backend, folder, "one round", balance=balance)
        for _ in range(settings.steps):
            run.step()
    running = run.clock.sequence_seconds / run.clock.seconds
    return {
        "seconds_per_step": run.clock.seconds / settings.steps + settings.train,
        "running": running / settings.running_target(settings.prompts),
    }


def rounds(settings: Settings, folder: Path) -> dict[str, float]:
    """Ratio and waste of rounds that begin early, with one replica. A round has as many prompts as a batch."""
    settings = replace(settings, replicas=1)
    seconds, tokens, wasted = dict[str, float](), 0.0, 0.0
    for balance in get_args(Balance):
        with LocalBackend() as backend:
            run = Simulation(settings, backend, folder, "rounds", balance=balance)
            batches = [run.step() for _ in range(settings.steps)]
        seconds[balance] = run.clock.seconds / settings.steps + settings.train
        if balance == "tokens":
            tokens = sum(batch.meta["generated_tokens"] for batch in batches)
            wasted = sum(batch.meta["metrics"]["rollout/wasted_tokens"] for batch in batches)
    return {
        "ratio": seconds["static"] / seconds["tokens"],
        "seconds_per_step": seconds["tokens"],
        "wasted_tokens": wasted / (wasted + tokens),
    }


def partial_rollouts(settings: Settings, folder: Path) -> dict[str, float]:
    """Figures of the steps after the warm-up."""
    metrics, oldest = [], []
    with LocalBackend() as backend:
        run = Simulation(settings, backend, folder, "partial")
        for _ in range(settings.warm_up):
            run.step()
        run.clock.seconds = run.clock.sequence_seconds = 0.0
        for _ in range(settings.steps):
            metrics.append(run.step().meta["metrics"])
            oldest.append(run.oldest_unfinished())
    running = run.clock.sequence_seconds / run.clock.seconds
    return {
        "seconds_per_step": run.clock.seconds / settings.steps + settings.train,
        "running": running / settings.running_target(settings.oversubmit * settings.prompts),
        "age_mean": mean(step["rollout/age/mean"] for step in metrics),
        "age_max": max(step["rollout/age/max"] for step in metrics),
        "oldest_unfinished": max(oldest),
        "stale_tokens": mean(step["rollout/stale_tokens"] for step in metrics),
        "recomputed_tokens": mean(step["rollout/recomputed_tokens"] for step in metrics),
        "groups_in_flight_first": in_flight(metrics[0]),
        "groups_in_flight_last": in_flight(metrics[-1]),
    }


def in_flight(metrics: dict[str, float]) -> float:
    """Groups in flight after a step."""
    return metrics["rollout/unfinished_groups"] + metrics["rollout/waiting_groups"]


def compared(settings: Settings, base: dict[str, float], folder: Path) -> dict[str, float]:
    """Figures of partial rollouts with their ratio. base: those of synchronous steps."""
    found = partial_rollouts(settings, folder)
    return {"ratio": base["seconds_per_step"] / found["seconds_per_step"]} | found


def line(settings: Settings, case: dict[str, float]) -> str:
    figures = "ratio {ratio:.2f}, running {running:.3f}, age mean {age_mean:.2f} max {age_max:.0f}, stale {stale_tokens:.2f}, "
    more = "recomputed {recomputed_tokens:.0f}, groups in flight {groups_in_flight_first:.0f} to {groups_in_flight_last:.0f}"
    return f"oversubmit {settings.oversubmit}, max_age {settings.max_age}: " + (figures + more).format(**case)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=int, default=64, help="of a step (default: %(default)s)")
    add("--n", type=int, default=8, help="responses to each (default: %(default)s)")
    add("--prompt_tokens", type=int, default=256, help="(default: %(default)s)")
    add("--max_tokens", type=int, default=8192, help="of a response; the mean is an eighth (default: %(default)s)")
    add("--slots", type=int, default=256, help="sequences that a replica runs at the same time (default: %(default)s)")
    add("--replicas", type=int, default=1, help="(default: %(default)s)")
    add("--oversubmit", type=float, default=1.5, help="async_training.oversubmit (default: %(default)s)")
    add("--max_age", type=int, default=4, help="async_training.max_age (default: %(default)s)")
    add("--a", type=float, default=5e-3, help="seconds of a decode step (default: %(default)s)")
    add("--b", type=float, default=8e-6, help="more for each running sequence (default: %(default)s)")
    add("--c", type=float, default=2e-6, help="seconds of prefill per token (default: %(default)s)")
    add("--d", type=float, default=0.0, help="more for a decode step in which requests enter (default: %(default)s)")
    add("--train", type=float, default=0.0, help="seconds of a step besides generation (default: %(default)s)")
    add("--steps", type=int, default=20, help="(default: %(default)s)")
    add("--warm_up", type=int, default=8, help="steps of partial rollouts before those (default: %(default)s)")
    add("--kept_share", type=float, default=0.5, help="of the groups, by dynamic sampling (default: %(default)s)")
    add("--sweep", action="store_true", help=f"oversubmit {OVERSUBMITS} with max_age {MAX_AGES}")
    args = vars(parser.parse_args(argv))
    sweep = args.pop("sweep")
    settings = Settings(**args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = synchronous(settings, folder)
        partial = compared(settings, base, folder)
        print(line(settings, partial), file=sys.stderr)
        report: dict[str, Any] = {"settings": asdict(settings), "synchronous": base, "partial": partial}
        report["rounds"] = rounds(settings, folder)
        print(
            "rounds that begin early: ratio {ratio:.2f}, wasted {wasted_tokens:.3f}".format(**report["rounds"]), file=sys.stderr
        )
        if sweep:
            report["sweep"] = []
            for oversubmit in OVERSUBMITS:
                for max_age in MAX_AGES:
                    case = replace(settings, oversubmit=oversubmit, max_age=max_age)
                    figures = compared(case, base, folder)
                    report["sweep"].append({"oversubmit": oversubmit, "max_age": max_age} | figures)
                    print(line(case, figures), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
