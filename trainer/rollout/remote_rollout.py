"""The controller's handle of the rollout role: places requests on engine replicas and joins their responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from trainer.cluster.remote import mesh_of
from trainer.cluster.watchdog import StartedCall, Watchdog
from trainer.rollout.scheduler import Ended, RolloutScheduler
from workers.batch import Batch
from workers.controller.group import WorkerGroup
from workers.controller.rpc import Call, role_call, worker_call
from workers.metric import Metrics, join_metrics
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.rollout.base import RolloutSpec, Sampling
from workers.rollout.progress import Progress, progress_file

ROLE = "rollout"
PHASES = {"start": "engine start", "generate": "generation", "sync": "weight sync", "ask": "counters"}
STEPS = 32  # engine steps of a call: a stuck engine is noticed, and free slots are filled, within as many
R = TypeVar("R")


class RemoteRollout:
    """The rollout role on all workers of a group."""

    def __init__(
        self, group: WorkerGroup, spec: RolloutSpec, source: str, watchdog: Watchdog, *, trainers: WorkerGroup | None = None
    ) -> None:
        """source: model role whose weights the engines use. trainers: its worker group, if it is not ``group``."""
        self.group = group
        self.engine = spec.rollout.name
        self.watchdog = watchdog
        self.source = source
        self.trainers = trainers if trainers is not group else None
        # Colocated engines that free their memory lose their weights while a model is active, see ``rest``.
        self._gives_way = spec.rollout.free_cache_engine and self.trainers is None
        self._version, self._slept = 0, False
        self._slots, self._balance = spec.rollout.max_num_seqs, spec.rollout.balance
        # SGLang generates between the calls too: its replicas keep no common time.
        self._in_step = self._balance == "tokens" and self.engine != "sglang"
        self._progress = None if spec.run_dir is None else Progress(progress_file(spec.run_dir, 0))
        from workers.roles.worker import Worker

        if self.trainers is None:
            places = self._call("start", worker_call(Worker.build_rollout, ROLE, spec, source))
        else:
            offering = worker_call(Worker.offer_weights, source, group.world_size)
            meeting, *_ = watchdog.call(self.trainers, "start", f"start of {source}", offering)
            assert meeting is not None, "rank 0 returns it"
            places = self._call("start", worker_call(Worker.build_rollout_apart, ROLE, spec, meeting))
        self.mesh = mesh_of(places)
        group.register_mesh(ROLE, self.mesh)

    def sync_weights(self, version: int) -> Metrics:
        """Give every engine the weights of the source; completions have ``version`` from now on."""
        self._version, self._slept = version, False
        receiving = role_call(ROLE, RolloutRole.sync_weights, version)
        if self.trainers is None:
            return join_metrics(self._call("sync", receiving))
        sending = (self.trainers, f"weight sync ({self.source} sends)", role_call(self.source, ModelRole.send_weights))
        # Both sides at the same time: the transfer is collective over senders and receivers.
        metrics, _ = self.watchdog.together("sync", (self.group, self._what("sync"), receiving), sending)
        return join_metrics(metrics)

    def rest(self, group: WorkerGroup | None) -> None:
        """Record that a model on the workers of ``group`` was active.

        Engines that slept meanwhile get their weights again before the next responses.
        """
        self._slept = self._slept or (self._gives_way and group is self.group)

    def generate(self, prompts: Batch, sampling: Sampling, group_size: int) -> Batch:
        """Generate a response to each row of ``prompts``; as ``stream``, in the order of the prompts and without rows["id"]."""
        whole = Batch.concat([*self.stream(prompts, sampling, group_size)])
        in_order = whole.select(whole.rows["id"].argsort())
        del in_order.rows["id"]
        return in_order

    def stream(self, prompts: Batch, sampling: Sampling, group_size: int) -> Iterator[Batch]:
        """Generate a response to each row of ``prompts``; yields responses, without the prompts, as they end.

        The engines generate while the caller works on what was yielded.

        prompts: input_ids, with rows["seed"] and rows["greedy"] (1: greedy, whatever ``sampling`` is). group_size: number of
        consecutive rows with the same prompt; they go to one engine, which computes the prompt once.

        Yielded tokens: input_ids, rollout_log_probs, weight_version (T,). Yielded rows (B,): id (row of ``prompts``), finished
        (1: terminated, 0: truncated).
        """
        if self._slept:
            self.sync_weights(self._version)
        scheduler = RolloutScheduler(
            n_replicas=len(self.mesh.output_ranks), slots=self._slots, max_tokens=sampling.max_tokens, balance=self._balance
        )
        for first in range(0, len(prompts), group_size):
            scheduler.admit(range(first, first + group_size), int(prompts.lengths[first]))
        prompts = prompts.with_rows(id=torch.arange(len(prompts)))
        none = prompts.select([])
        calls: set[StartedCall[Batch]] = set()
        results: dict[StartedCall[Batch], Batch] = {}
        with self._reporting(len(prompts)) as report:
            while True:
                ended = {call.replica: Ended(one.rows["id"].tolist(), one.lengths.tolist()) for call, one in results.items()}
                scheduler.record(ended)
                for replica, rows in scheduler.calls().items():
                    new = prompts.select(rows) if rows else none
                    calls.add(self._advance(replica, new, sampling, scheduler.held(replica)))
                report(ended.values())
                yield from (responses for responses in results.values() if len(responses))
                if not calls:
                    break
                results = self.watchdog.results(calls, every=self._in_step)
                calls -= results.keys()

    def _advance(self, replica: int, prompts: Batch, sampling: Sampling, held: int) -> StartedCall[Batch]:
        """Start RolloutRole.advance on a replica. held: number of responses that it has not finished."""
        call = role_call(ROLE, RolloutRole.advance, prompts, sampling, STEPS)

        def work() -> list[str]:
            mine = f"{held} unfinished responses, at most {STEPS} steps"
            return [mine if shard == replica else "" for shard in self.mesh.shard_of_rank]

        return self.watchdog.start(self.group, "generate", self._what("generate"), call, mesh=ROLE, replica=replica, work=work)

    @contextmanager
    def _reporting(self, requested: int) -> Iterator[Callable[[Iterable[Ended]], None]]:
        """Report progress to the display; yields a function to be called with the responses that ended."""
        done = tokens = 0

        def report(ended: Iterable[Ended]) -> None:
            nonlocal done, tokens
            for one in ended:
                done, tokens = done + len(one.rows), tokens + sum(one.lengths)
            if self._progress is not None:
                self._progress.record(done, tokens)

        if self._progress is not None:
            self._progress.begin(requested)
        yield report

    def _call(self, phase: str, call: Call[R], *, mesh: str | None = None, work: Callable[[], Sequence[str]] = list) -> list[R]:
        """Result of a call, see Watchdog.call. The group has no other call in progress: the phase's time is that of this call."""
        return self.watchdog.call(self.group, phase, self._what(phase), call, mesh=mesh, work=work)

    def _what(self, phase: str) -> str:
        return f"{PHASES[phase]} (rollout engine {self.engine})"

    def stats(self) -> dict[str, float]:
        """Counters of all engines since the last call, summed; see Rollout.stats."""
        parts = self._call("ask", role_call(ROLE, RolloutRole.stats), mesh=ROLE)
        return {name: sum(part[name] for part in parts) for name in parts[0]}
