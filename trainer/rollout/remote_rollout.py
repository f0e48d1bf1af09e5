"""The controller's handle of the rollout role: places requests on engine replicas and joins their responses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from trainer.cluster.launch import Replicas
from trainer.cluster.remote import mesh_of
from trainer.cluster.watchdog import StartedCall, Watchdog
from trainer.rollout.scheduler import Ended, RolloutScheduler
from workers.batch import Batch
from workers.controller.group import WorkerError, WorkerGroup
from workers.controller.rpc import Call, Mesh, role_call, worker_call
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
    """The rollout role on all workers that have a part of it.

    groups: their worker groups. Replicas in a pool of their own have a group each, ``meshes`` of one shard, and can be replaced;
    otherwise one group has all replicas.
    """

    def __init__(
        self,
        workers: WorkerGroup | Replicas,
        spec: RolloutSpec,
        source: str,
        watchdog: Watchdog,
        *,
        trainers: WorkerGroup | None = None,
    ) -> None:
        """source: model role whose weights the engines use. trainers: its worker group, if it is not ``workers``."""
        self._replicas = workers if isinstance(workers, Replicas) else None
        self.groups = workers.groups if isinstance(workers, Replicas) else [workers]
        self.engine = spec.rollout.name
        self.watchdog = watchdog
        self.source = source
        self.trainers = trainers if trainers is not workers else None
        # Colocated engines that free their memory lose their weights while a model is active, see ``rest``.
        self._gives_way = spec.rollout.free_cache_engine and self.trainers is None
        self.version, self._slept = 0, False
        self._spec, self.balance = spec, spec.rollout.balance
        self._progress = None if spec.run_dir is None else Progress(progress_file(spec.run_dir, 0))
        self.meshes: list[Mesh] = self._build(range(len(self.groups)))

    def _build(self, numbers: Sequence[int]) -> list[Mesh]:
        """Build the engines of these groups; returns the mesh of each."""
        from workers.roles.worker import Worker

        if self.trainers is None:
            calls = [worker_call(Worker.build_rollout, ROLE, self._spec, self.source) for _ in numbers]
        else:
            calls = []
            for number in numbers:
                offering = worker_call(Worker.offer_weights, self.source, self.groups[number].world_size, number)
                meeting, *_ = self.watchdog.call(self.trainers, "start", f"start of {self.source}", offering)
                assert meeting is not None, "rank 0 returns it"
                calls.append(worker_call(Worker.build_rollout_apart, ROLE, self._spec, meeting))
        meshes = [mesh_of(places) for places in self._together("start", dict(zip(numbers, calls, strict=True)))]
        for number, mesh in zip(numbers, meshes, strict=True):
            self.groups[number].register_mesh(ROLE, mesh)
        return meshes

    def sync_weights(self, version: int, *, release: Callable[[], object] = lambda: None, keep_cache: bool = False) -> Metrics:
        """Give every engine the weights of the source; completions have ``version`` from now on.

        Replicas that died since their last call are replaced first. release: takes the requests that the engines have, which
        otherwise continue with the new weights; called if a replica died, because one without its requests follows. keep_cache:
        see Rollout.load_weights.
        """
        from workers.roles.worker import Worker

        self.version, self._slept = version, False
        if self._replicas is not None:
            # A dead replica would leave the trainers waiting in the transfer until its limit.
            asking = worker_call(Worker.is_alive)
            alive = [self.start_call(asking, replica, phase="ask") for replica in range(self.n_replicas)]
            results = self.watchdog.results(alive, every=True)
            for replica, call in enumerate(alive):
                if isinstance(death := results[call], WorkerError):
                    release()
                    with self._replicas.replaced(replica, death):
                        self._build([replica])
        return self._sync(range(len(self.groups)), keep_cache=keep_cache)

    def _sync(self, numbers: Sequence[int], *, keep_cache: bool = False) -> Metrics:
        """Give the engines of these groups the weights of the source."""
        receiving = dict.fromkeys(numbers, role_call(ROLE, RolloutRole.sync_weights, self.version, keep_cache))
        if self.trainers is None:
            return join_metrics([one for of_group in self._together("sync", receiving) for one in of_group])
        what = f"weight sync ({self.source} sends)"
        sending = (self.trainers, what, role_call(self.source, ModelRole.send_weights, list(numbers)))
        # Both sides at the same time: the transfer is collective over senders and receivers.
        *metrics, _ = self._together("sync", receiving, sending)
        return join_metrics([one for of_group in metrics for one in of_group])

    def lose(self, replica: int, death: WorkerError) -> None:
        """Record that a replica died, which the next sync replaces. Raises ``death`` if it cannot be replaced."""
        if self._replicas is None:
            raise death
        cause = str(death).partition("\n")[0]
        text = f"replica {replica} of rollout generates nothing until the next weight sync: {cause}"
        self.watchdog.events.add(self.watchdog.step, "lost", text)

    def replace(self, replica: int, death: WorkerError) -> None:
        """Replace a replica by one without requests, with the present weights. Raises ``death`` if it cannot be replaced."""
        if self._replicas is None:
            raise death
        with self._replicas.replaced(replica, death):
            self._build([replica])
            self._sync([replica])

    def rest(self, group: WorkerGroup | None) -> None:
        """Record that a model on the workers of ``group`` was active.

        Engines that slept meanwhile get their weights again before the next responses.
        """
        self._slept = self._slept or (self._gives_way and group in self.groups)

    def generate(self, prompts: Batch, sampling: Sampling, group_size: int) -> Batch:
        """Generate a response to each row of ``prompts``; as ``stream``, in the order of the prompts and without rows["id"]."""
        parts = [*self.stream(prompts, sampling, group_size)]
        whole = Batch.concat(parts, torch.cat([part.rows["id"] for part in parts]).argsort())
        del whole.rows["id"]
        return whole

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
        self,
        sampling: Sampling,
        requests: Callable[[Sequence[int]], Batch],
        *,
        expected: int,
        in_step: bool | None = None,
        replaces: bool = True,
    ) -> RolloutFlow:
        """A flow of requests through the engines, which have none. See RolloutFlow.

        expected: number of responses, for the display. in_step: replicas wait for each other after every tick; None: if the
        balance is "tokens". replaces: replace a replica that dies, if it can be. Without it the flow continues with the others:
        while the trainers, which would send it the weights, are at work.
        """
        if self._slept:
            self.sync_weights(self.version)
        slots = self._spec.rollout.max_num_seqs
        scheduler = RolloutScheduler(
            n_replicas=self.n_replicas, slots=slots, max_tokens=sampling.max_tokens, balance=self.balance
        )
        if self._progress is not None:
            self._progress.begin(expected)
        in_step = (self.balance == "tokens" if in_step is None else in_step) and self.keeps_common_time
        replaces = replaces and self.replaceable
        return RolloutFlow(self, scheduler, sampling, requests, self._progress, in_step=in_step, replaces=replaces)

    @property
    def keeps_common_time(self) -> bool:
        """Whether engine steps happen in calls only. SGLang generates between the calls too."""
        return self.engine != "sglang"

    @property
    def n_replicas(self) -> int:
        return sum(len(mesh.output_ranks) for mesh in self.meshes)

    @property
    def replaceable(self) -> bool:
        """Whether a replica that dies can be replaced."""
        return self._replicas is not None

    def start_call(self, call: Call[R], replica: int, work: str = "", *, phase: str = "generate") -> StartedCall[R]:
        """Start a call on the ranks of a replica. work: what they do in it, for messages."""
        number, shard = (0, replica) if self._replicas is None else (replica, 0)

        def of_ranks() -> list[str]:
            return [work if own == shard else "" for own in self.meshes[number].shard_of_rank]

        what = self._what(phase, number)
        return self.watchdog.start(self.groups[number], phase, what, call, mesh=ROLE, replica=shard, work=of_ranks)

    def _together(self, phase: str, calls: Mapping[int, Call[R]], *others: tuple[WorkerGroup, str, Call[Any]]) -> list[list[Any]]:
        """Results of calls on groups, by number, and on other workers that they wait for; see Watchdog.together."""
        own = ((self.groups[number], self._what(phase, number), call) for number, call in calls.items())
        return self.watchdog.together(phase, *own, *others)

    def _what(self, phase: str, number: int) -> str:
        """What workers of a group do, for messages."""
        return f"{PHASES[phase]} (rollout engine {self.engine}{f', replica {number}' if len(self.groups) > 1 else ''})"

    def stats(self) -> dict[str, float]:
        """Counters of all engines since the last call, summed; see Rollout.stats."""
        parts = self._together("ask", dict.fromkeys(range(len(self.groups)), role_call(ROLE, RolloutRole.stats)))
        first = [of_group[rank] for of_group, mesh in zip(parts, self.meshes, strict=True) for rank in mesh.output_ranks]
        return {name: sum(part[name] for part in first) for name in first[0]}


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
        replaces: bool,
    ) -> None:
        """requests: rows with these ids, as RolloutRole.advance takes them. in_step, replaces: see RemoteRollout.flow."""
        self._rollout = rollout
        self._scheduler = scheduler
        self._sampling = sampling
        self._requests = requests
        self._progress = progress
        self._in_step = in_step
        self._replaces = replaces
        self._calls: dict[StartedCall[Batch], tuple[int, int]] = {}
        """Calls in progress: (replica, number of the call on it)."""
        self._made: list[list[Call[Batch]]] = [[] for _ in range(rollout.n_replicas)]
        """By replica: its calls so far, which are repeated if it is replaced; only the last one if it cannot be."""
        self._ended = self._ended_tokens = 0
        self._gone: set[int] = set()
        """Requests to forget as soon as their replica has no call."""
        self.new: list[Batch] = []
        """New tokens of unfinished requests in the last tick, if it was started with ``streams``."""

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        """Queue requests with the same prompt; one replica gets them."""
        self._scheduler.admit(ids, prompt_tokens)

    @property
    def waiting(self) -> bool:
        """Whether requests wait for a replica that has room for them."""
        return self._scheduler.waiting

    def start(self, steps: int | None = None, *, streams: bool = False) -> bool:
        """Give the replicas their next calls; returns whether any call is in progress.

        steps: engine steps of a call, STEPS if None. streams: see ``new``.
        """
        aborted: dict[int, list[int]] = {}
        if self._gone:
            aborted = self._scheduler.forget(self._gone)
            self._gone = {id for id in self._gone if self._scheduler.has(id)}
        for replica, ids in self._scheduler.calls(aborted).items():
            self._start(replica, self._advance(ids, steps or STEPS, aborted.get(replica, ()), streams))
        return bool(self._calls)

    def forget(self, ids: Collection[int]) -> None:
        """Abort requests with the next tick, and forget those that ended; their ids are not used again."""
        self._gone.update(ids)

    def wait(self) -> list[Batch]:
        """Wait for the calls of this tick; returns the responses that ended, one batch or none from each replica.

        Where replicas keep no common time: for at least one call.
        """
        results = self._results(every=self._in_step)
        self.new = [one.select((~one.rows["ended"]).nonzero().flatten()) for one in results.values() if "ended" in one.rows]
        # Where replicas keep no common time, calls that were started with and without ``streams`` may end together.
        results = {
            replica: one.select(one.rows["ended"].nonzero().flatten()) if "ended" in one.rows else one
            for replica, one in results.items()
        }
        self._scheduler.record(
            {replica: Ended(one.rows["id"].tolist(), one.lengths.tolist()) for replica, one in results.items()}
        )
        self._ended += sum(map(len, results.values()))
        self._ended_tokens += sum(one.total_tokens for one in results.values())
        if self._progress is not None:
            self._progress.record(self._ended, self._ended_tokens)
        return [responses for responses in results.values() if len(responses)]

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return self._scheduler.unfinished

    def settle(self) -> list[Batch]:
        """Wait for the calls in progress; the engines keep the requests. Returns responses that ended.

        A replica that dies from now on is not replaced here: its calls cannot be repeated with other weights.
        """
        self._replaces = False
        return self._outstanding()

    @property
    def has_lost(self) -> bool:
        """Whether a replica died and was not replaced. The flow has no longer the requests that it had."""
        return len(self._scheduler.replicas) < len(self._made)

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        """Take all requests from the engines. Returns responses that ended meanwhile, and what was sampled for the others."""
        ended = self._outstanding()
        for replica in self._scheduler.replicas:
            self._start(replica, role_call(ROLE, RolloutRole.suspend))
        # In the order of replicas: the order in which calls end differs from run to run.
        parts = [part for _, part in sorted(self._results(every=True).items())]
        ended += [part.select(part.rows["ended"].nonzero().flatten()) for part in parts if part.rows["ended"].any()]
        return ended, [part.select((~part.rows["ended"]).nonzero().flatten()) for part in parts]

    def discard(self) -> list[Batch]:
        """Take all requests from the engines, which are never continued; returns what was sampled for them."""
        ended, interrupted = self.suspend()
        return [*ended, *interrupted]

    def _outstanding(self) -> list[Batch]:
        ended: list[Batch] = []
        while self._calls:
            ended += self.wait()
        return ended

    def _advance(self, ids: Sequence[int], steps: int, abort: Sequence[int] = (), streams: bool = False) -> Call[Batch]:
        requests = self._requests(ids) if ids else None
        more = (abort, streams) if abort or streams else ()  # of servers only
        return role_call(ROLE, RolloutRole.advance, requests, self._sampling, steps, *more)

    def _start(self, replica: int, call: Call[Batch]) -> None:
        """Start the next call on a replica."""
        if not (self._replaces and self._rollout.keeps_common_time):
            self._made[replica].clear()
        self._made[replica].append(call)
        self._run(replica, len(self._made[replica]) - 1)

    def _run(self, replica: int, number: int) -> None:
        work = f"{self._scheduler.held(replica)} unfinished responses, at most {STEPS} steps"
        self._calls[self._rollout.start_call(self._made[replica][number], replica, work)] = replica, number

    def _results(self, *, every: bool) -> dict[int, Batch]:
        """Results of the calls that ended, by replica, after waiting for the first one (every: for all).

        A replica that died is replaced, and repeats its calls since the flow began: the same requests share its steps again, and
        the result of the last call is the one that was lost. If it may not be replaced now, it has no result, and the flow has no
        longer the requests that it had.
        """
        found: dict[int, Batch] = {}
        while self._calls and (every or not found):
            for call, result in self._rollout.watchdog.results(self._calls, every=every).items():
                replica, number = self._calls.pop(call)
                if isinstance(result, WorkerError):
                    # The trainers are in an update: a new replica could get no weights, or those of another version.
                    if not self._replaces:
                        self._rollout.lose(replica, result)
                        self._scheduler.lose(replica)
                        continue
                    self._rollout.replace(replica, result)
                    if not self._rollout.keeps_common_time:
                        self._made[replica] = self._reissued(replica)
                    self._run(replica, 0)
                elif number + 1 < len(self._made[replica]):
                    self._run(replica, number + 1)
                else:
                    found[replica] = result
        return found

    def _reissued(self, replica: int) -> list[Call[Batch]]:
        """Calls for an engine whose steps cannot be repeated: all unfinished requests, then the call that was lost."""
        lost = self._made[replica][-1]
        again = self._advance((), STEPS) if lost.method == RolloutRole.advance.__name__ else lost
        return [self._advance(self._scheduler.rows(replica), 0), again]
