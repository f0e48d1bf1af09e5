"""The controller's handle of the rollout role: places requests on engine replicas and joins their responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        self.version, self._slept = 0, False
        self._slots, self.balance = spec.rollout.max_num_seqs, spec.rollout.balance
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
        self.version, self._slept = version, False
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
        prompts = prompts.with_rows(id=torch.arange(len(prompts)))
        flow = self.flow(sampling, prompts.select, expected=len(prompts))
        for first in range(0, len(prompts), group_size):
            flow.admit(range(first, first + group_size), int(prompts.lengths[first]))
        ended: list[Batch] = []
        while flow.start():
            yield from ended
            ended = flow.wait()
        yield from ended

    def flow(
        self, sampling: Sampling, requests: Callable[[Sequence[int]], Batch], *, expected: int, in_step: bool = False
    ) -> RolloutFlow:
        """A flow of requests through the engines, which have none. See RolloutFlow.

        expected: number of responses, for the display. in_step: replicas wait for each other after every tick under any balance.
        """
        if self._slept:
            self.sync_weights(self.version)
        scheduler = RolloutScheduler(
            n_replicas=len(self.mesh.output_ranks), slots=self._slots, max_tokens=sampling.max_tokens, balance=self.balance
        )
        if self._progress is not None:
            self._progress.begin(expected)
        # SGLang generates between the calls too: its replicas keep no common time.
        in_step = (in_step or self.balance == "tokens") and self.engine != "sglang"
        return RolloutFlow(self, scheduler, sampling, requests, self._progress, in_step=in_step)

    def start_call(self, call: Call[Batch], replica: int, work: str) -> StartedCall[Batch]:
        """Start a call on the ranks of a replica. work: what they do in it, for messages."""

        def of_ranks() -> list[str]:
            return [work if shard == replica else "" for shard in self.mesh.shard_of_rank]

        what = self._what("generate")
        return self.watchdog.start(self.group, "generate", what, call, mesh=ROLE, replica=replica, work=of_ranks)

    def suspend(self) -> list[Batch]:
        """Take all requests from the engines, between calls; see RolloutRole.suspend."""
        return self._call("generate", role_call(ROLE, RolloutRole.suspend), mesh=ROLE)

    def _call(self, phase: str, call: Call[R], *, mesh: str | None = None, work: Callable[[], Sequence[str]] = list) -> list[R]:
        """Result of a call, see Watchdog.call. The group has no other call in progress: the phase's time is that of this call."""
        return self.watchdog.call(self.group, phase, self._what(phase), call, mesh=mesh, work=work)

    def _what(self, phase: str) -> str:
        return f"{PHASES[phase]} (rollout engine {self.engine})"

    def stats(self) -> dict[str, float]:
        """Counters of all engines since the last call, summed; see Rollout.stats."""
        parts = self._call("ask", role_call(ROLE, RolloutRole.stats), mesh=ROLE)
        return {name: sum(part[name] for part in parts) for name in parts[0]}


class RolloutFlow:
    """Requests that go through the engines of a RemoteRollout, tick by tick.

    A tick is one call of at most ``STEPS`` engine steps on each replica that has work. ``start`` begins it and ``wait`` ends it;
    requests are admitted between ``wait`` and ``start``. The engines work while the caller uses the responses of earlier ticks.
    """

    def __init__(
        self,
        rollout: RemoteRollout,
        scheduler: RolloutScheduler,
        sampling: Sampling,
        requests: Callable[[Sequence[int]], Batch],
        progress: Progress | None,
        *,
        in_step: bool,
    ) -> None:
        """requests: rows with these ids, as RolloutRole.advance takes them. in_step: see RemoteRollout.flow."""
        self._rollout = rollout
        self._scheduler = scheduler
        self._sampling = sampling
        self._requests = requests
        self._progress = progress
        self._in_step = in_step
        self._calls: set[StartedCall[Batch]] = set()
        self._ended = self._ended_tokens = 0

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        """Queue requests with the same prompt; one replica gets them."""
        self._scheduler.admit(ids, prompt_tokens)

    @property
    def waiting(self) -> bool:
        """Whether requests wait for a replica that has room for them."""
        return self._scheduler.waiting

    def start(self) -> bool:
        """Give the replicas their next calls; returns whether any call is in progress."""
        for replica, ids in self._scheduler.calls().items():
            requests = self._requests(ids) if ids else None
            call = role_call(ROLE, RolloutRole.advance, requests, self._sampling, STEPS)
            work = f"{self._scheduler.held(replica)} unfinished responses, at most {STEPS} steps"
            self._calls.add(self._rollout.start_call(call, replica, work))
        return bool(self._calls)

    def wait(self) -> list[Batch]:
        """Wait for the calls of this tick; returns the responses that ended, one batch or none from each replica.

        Where replicas keep no common time: for at least one call.
        """
        results = self._rollout.watchdog.results(self._calls, every=self._in_step)
        self._calls -= results.keys()
        self._scheduler.record(
            {call.replica: Ended(one.rows["id"].tolist(), one.lengths.tolist()) for call, one in results.items()}
        )
        self._ended += sum(map(len, results.values()))
        self._ended_tokens += sum(one.total_tokens for one in results.values())
        if self._progress is not None:
            self._progress.record(self._ended, self._ended_tokens)
        return [responses for responses in results.values() if len(responses)]

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        """Take all requests from the engines. Returns responses that ended meanwhile, and what was sampled for the others."""
        ended: list[Batch] = []
        while self._calls:
            ended += self.wait()
        return ended, self._rollout.suspend()
