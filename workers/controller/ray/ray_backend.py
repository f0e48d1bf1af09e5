"""Workers as Ray actors, one a slot. Beside ray_places.py the only file in workers/ that imports ray."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from workers.controller.actor import Failure, Shell, hold_port, pack_call
from workers.controller.dispatch import Call
from workers.controller.environment import import_path, set_environment
from workers.controller.group import Backend, PhaseTimeout, Replies, Transport, WorkerError, WorkerGroup, WorkerInfo
from workers.controller.logs import last_lines, tail, write_to
from workers.controller.process_inspection import ProcessState, RankState, examine
from workers.controller.ray.guard import Guard
from workers.controller.ray.ray_places import SLOT, Places
from workers.controller.ray.ray_session import MARK, SessionDir, end_processes, family
from workers.controller.resource_pool import ResourcePool
from workers.controller.stacks import answer_for_stacks
from workers.controller.stop import die_with_parent, handlers_kept, shielded
from workers.controller.wire import Parcel, pack, unpack

INLINE_BYTES = 64 * 1024  # larger parcels go through the object store; Ray sends up to 100 KB with the call itself
STORE_BYTES = 8 * 2**30
SHUTDOWN_SECONDS = 20.0
DEATH_SECONDS, NODE_DEATH_SECONDS = 1.0, 40.0  # until Ray tells of the death of a process, of a node, at most
PEER_LOST = re.compile(r"[Cc]onnection (reset|closed) by peer|[Bb]roken pipe|remote process exited")  # gloo's words, and NCCL's
IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what `ray job submit` sets for what it starts
HOMES_SECONDS, NODE_SECONDS = 2.0, 30.0  # until the ranks of a group, and the processes of another node, are known


class RayBackend(Backend):
    """Starts a Ray of its own on this machine: loopback only, in directories of its own. Or joins the one that runs, if
    ``nnodes`` > 1, ``ray_init`` has an address, or this is a job of `ray job submit`; then it starts and ends nothing but its
    workers.

    What ``ray_init`` says wins over what is chosen here. Workers write to <run_dir>/logs/rank_<rank>_<group>.log, on their node,
    unless log_to_driver is asked for.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path,
        nnodes: int,
        n_gpus_per_node: int,
        device: Literal["cpu", "cuda"],
        ray_init: Mapping[str, Any],
        join_seconds: float = 0.0,
    ) -> None:
        """join_seconds: so long a cluster that is joined may take to become large enough."""
        assert threading.current_thread() is threading.main_thread(), "Ray's processes end with the thread that starts them"
        self._run_dir = Path(run_dir).absolute()
        self._logs = None if ray_init.get("log_to_driver") else self._run_dir / "logs"
        self._opened = ExitStack()
        address = ray_init.get("address") or ("auto" if nnodes > 1 or IN_JOB in os.environ else "local")
        self._joined = address != "local"
        self._places = Places(join_seconds if self._joined else None)
        environment = {
            "PYTHONPATH": os.pathsep.join(import_path()),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # set in launch: all GPUs of the run, by Place
        }
        try:
            with handlers_kept():
                if self._joined:
                    self._join({**ray_init, "address": address}, environment)
                else:
                    self._start(ray_init, environment, n_gpus_per_node, device)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, ray_init: Mapping[str, Any], environment: Mapping[str, str], n_slots: int, device: str) -> None:
        """A Ray of our own. It takes 2.1 s on two idle cores, the half of it for a dashboard that Ray starts unasked."""
        session = SessionDir(self._run_dir)
        self._opened.callback(session.remove)
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "WARNING",
            "num_cpus": n_slots,  # workers take none; so many processes are started beforehand, at the same time
            "object_store_memory": store_bytes(),
            "object_spilling_directory": str(session.spill),
            "_temp_dir": str(session.path),
            **ray_init,
            "address": "local",
        }
        slots = {SLOT: n_slots} if device == "cpu" else {}
        options["resources"] = slots | (ray_init.get("resources") or {})
        # Ray's memory monitor ends workers when the machine, all its users together, is 95 % full.
        options["_system_config"] = {"memory_monitor_refresh_ms": 0} | (ray_init.get("_system_config") or {})
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces its token at every start
        self._opened.callback(Guard(session.places).dismiss)
        self._opened.callback(end_ray, session.places)
        with set_environment({**environment, MARK: session.mark}), loopback_only():
            ray.init(**options)

    def _join(self, ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        runtime_env = ray_init.get("runtime_env") or {}
        runtime_env = {**runtime_env, "env_vars": {**environment, **(runtime_env.get("env_vars") or {})}}
        options = {"log_to_driver": False, "logging_level": "WARNING", **ray_init, "runtime_env": runtime_env}
        self._opened.callback(ray.shutdown)
        with set_environment({"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}):  # PYTHONPATH of a job's env_vars is in ours
            ray.init(**options)

    def start_group(
        self,
        name: str,
        pool: ResourcePool,
        worker: str | type,
        /,
        *args: Any,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        place = self._places.of(pool)
        slot: dict[str, Any] = {"num_gpus": 1} if pool.device == "cuda" else {"resources": {SLOT: 1}}
        if pool.room is not None:  # who shares a slot with whom is ours to say: Ray would put two halves of a pool onto one GPU
            slot = {}
        actors: list[Any] = []
        for rank in range(pool.world_size):
            node, _ = pool.place(rank)
            strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=node)
            actors.append(ray.remote(RayShell).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy, **slot).remote())
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if pool.device == "cpu" else {}
        ship = Shipper()
        names, parcels = pack_call((args, kwargs), ship)
        homes = [actor.home.remote() for actor in actors]
        logs = [self._logs and self._logs / f"rank_{rank}_{name}.log" for rank in range(pool.world_size)]
        address = actors[0].address.remote()  # not waited for: Ray hands it on when it is there
        for rank, actor in enumerate(actors):
            node, local_rank = pool.place(rank)
            standing = (rank, pool.world_size, local_rank, node)
            environment = {**threads, **place.environment(node), **(env or {})}
            actor.launch.remote(standing, address, logs[rank], environment, ship(worker), names, *parcels)
        own_place = place.group if pool.room is None else None
        group = WorkerGroup(name, pool.world_size, RayTransport(actors, Ranks(homes, logs), own_place))
        self._opened.callback(group.shutdown)
        return group

    def shutdown(self) -> None:
        with shielded():
            self._opened.close()


def end_ray(places: Collection[str]) -> None:
    """Our own Ray, with everything that it or its workers started. places: the session's."""
    known = family(places)
    hammer = threading.Timer(SHUTDOWN_SECONDS, end_processes, (places, known))
    hammer.start()
    ray.shutdown()  # waits for its daemons for ever, also for one that is stopped
    hammer.cancel()
    end_processes(places, known)


class RayShell(Shell):
    """The actor. It imports its worker in ``launch``, after the environment is set. An environment through Ray's runtime_env
    would cost 0.65 s: prestarted processes could not be used."""

    def address(self) -> tuple[str, int]:
        """Where the ranks meet. The port stays reserved while this process lives."""
        self._held = hold_port()
        return ray.util.get_node_ip_address(), self._held.getsockname()[1]

    def home(self) -> tuple[str, int]:
        """Ray's id of the node, and the process's."""
        answer_for_stacks()
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def launch(
        self,
        standing: tuple[int, int, int, int],
        address: tuple[str, int],
        log_path: Path | None,
        env: Mapping[str, str],
        worker: Parcel,
        names: tuple[str, ...],
        *parcels: Parcel,
    ) -> Parcel | Failure:
        """standing: rank, world size, local rank, node rank."""
        die_with_parent(os.getppid())
        if log_path is not None:
            write_to(log_path)
        os.environ.update(env)
        return without_exception(self.start(WorkerInfo(*standing, *address), worker, names, *parcels))

    def call(self, method: str, wanted: bool, names: tuple[str, ...], *parcels: Parcel) -> Parcel | Failure:
        return without_exception(super().call(method, wanted, names, *parcels))


class Shipper:
    """Packs an argument once, and puts a large one into the object store once, however many ranks get it.

    Arguments are known by identity, so they must outlive it.
    """

    def __init__(self, limit: float | None = None) -> None:
        """limit: seconds that the store may take for one; then TimeoutError is raised."""
        self._limit = limit
        self._shipped: dict[int, Parcel | ray.ObjectRef] = {}

    def __call__(self, value: Any) -> Parcel | ray.ObjectRef:
        if id(value) not in self._shipped:
            parcel = pack(value)
            self._shipped[id(value)] = self._put(parcel) if parcel.nbytes > INLINE_BYTES else parcel
        return self._shipped[id(value)]

    def _put(self, parcel: Parcel) -> ray.ObjectRef:
        """ray.put has no limit, and heeds no signal where its node does not answer: a thread waits for it."""
        put = Future[ray.ObjectRef]()
        threading.Thread(target=self._work, args=(put, parcel), daemon=True).start()
        return put.result(self._limit)

    @staticmethod
    def _work(put: Future[ray.ObjectRef], parcel: Parcel) -> None:
        try:
            put.set_result(ray.put(parcel))
        except Exception as error:  # whoever waits for it gets it
            put.set_exception(error)


class RayTransport(Transport):
    def __init__(self, actors: Sequence[Any], ranks: Ranks, place: PlacementGroup | None) -> None:
        """place: given back when the workers end."""
        self._actors = actors
        self._ranks = ranks
        self._place = place

    def send(self, method: str, calls: Sequence[Call], wanted: Sequence[bool], timeout: float | None) -> Replies:
        ship = Shipper(timeout)
        refs = []
        for actor, call, wants in zip(self._actors, calls, wanted, strict=True):
            try:
                names, parcels = pack_call(call, ship)
            except TimeoutError:
                raise PhaseTimeout(
                    method, range(len(calls)), timeout or 0.0, "Ray's object store does not take the batch"
                ) from None
            refs.append(actor.call.remote(method, wants, names, *parcels))
        return RayReplies(method, refs, self._ranks)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._place is not None:
            remove_placement_group(self._place)


class Ranks:
    """Where the ranks of a group are, and what they write."""

    def __init__(self, homes: Sequence[ray.ObjectRef], logs: Sequence[Path | None]) -> None:
        """homes: of ``RayShell.home``, on the way."""
        self._homes = list(homes)
        self.logs = logs

    def examine(self, missing: Collection[int]) -> list[RankState]:
        """Every rank's own machine is asked: this one directly, for its Ray may be what is ill."""
        known = self._known()
        here = ray.get_runtime_context().get_node_id()
        found: dict[int, tuple[ProcessState, ...]] = {}
        for node in {node for node, _ in known.values()}:
            ranks = [rank for rank, (home, _) in known.items() if home == node]
            pids = [known[rank][1] for rank in ranks]
            found |= dict(zip(ranks, examine(pids) if node == here else examine_on(node, pids), strict=False))
        return [
            RankState(rank, rank not in missing, found.get(rank, ()), log, last_lines(log)) for rank, log in enumerate(self.logs)
        ]

    def _known(self) -> dict[int, tuple[str, int]]:
        """By rank: what ``RayShell.home`` told of it, if it lived long enough to."""
        arrived, _ = ray.wait(list(self._homes), num_returns=len(self._homes), timeout=HOMES_SECONDS)
        known = {}
        for ref in arrived:
            with suppress(ray.exceptions.RayError):
                known[self._homes.index(ref)] = ray.get(ref)
        return known


def examine_on(node: str, pids: Sequence[int]) -> list[tuple[ProcessState, ...]]:
    """Nothing if the node does not answer."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        return ray.get(ray.remote(examine).options(num_cpus=0, scheduling_strategy=there).remote(pids), timeout=NODE_SECONDS)
    except ray.exceptions.RayError:
        return []


class RayReplies(Replies):
    def __init__(self, method: str, refs: Sequence[ray.ObjectRef], ranks: Ranks) -> None:
        super().__init__(len(refs))
        self._method = method
        self._refs = dict(enumerate(refs))
        self._ranks = ranks

    def receive(self, timeout: float | None) -> None:
        if errors := self._take_in(timeout):
            raise self._first_cause(errors)

    def examine(self) -> list[RankState]:
        return self._ranks.examine(self.missing)

    def _first_cause(self, errors: list[WorkerError]) -> WorkerError:
        """A rank that dies takes others with it, and their complaints may come first: for a moment, wait for news of a death.
        Where all that is said is that a peer is gone, for as long as Ray takes to miss a node."""
        peer_lost = all(PEER_LOST.search(error.message) for error in errors)
        deadline = time.monotonic() + (NODE_DEATH_SECONDS if peer_lost else DEATH_SECONDS)
        while not any(map(died, errors)) and self._refs and (remaining := deadline - time.monotonic()) > 0:
            errors = errors + self._take_in(remaining)
        return min(errors, key=lambda error: (not died(error), errors.index(error)))

    def _take_in(self, timeout: float | None) -> list[WorkerError]:
        """What has arrived, after one answer at least or ``timeout`` seconds; the errors among it."""
        pending = list(self._refs.values())
        arrived, _ = ray.wait(pending, num_returns=1, timeout=timeout)
        if arrived:
            arrived, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        here, now = set(arrived), time.time()
        errors = []
        for rank in [rank for rank, ref in self._refs.items() if ref in here]:
            try:
                self.came(rank, self._unpacked(rank, self._refs.pop(rank)), now)
            except WorkerError as error:
                errors.append(error)
        return errors

    def _unpacked(self, rank: int, ref: ray.ObjectRef) -> Any:
        try:
            answer = ray.get(ref, timeout=NODE_SECONDS)  # it is here, unless its node is lost
        except ray.exceptions.RayError as error:
            raise WorkerError(rank, self._method, cause_of_death(str(error)), tail(self._ranks.logs[rank])) from error
        if isinstance(answer, Failure):
            raise answer.raised(rank)
        return unpack(answer)


def died(error: WorkerError) -> bool:
    """The process, and not a call in it."""
    return isinstance(error.__cause__, ray.exceptions.RayError)


def without_exception(answer: Parcel | Failure) -> Parcel | Failure:
    """The exception stays in its process: it may hold anything."""
    return replace(answer, error=None) if isinstance(answer, Failure) else answer


def cause_of_death(said: str) -> str:
    """What Ray says of a dead actor, in a line."""
    pid = re.search(r"pid: (\d+)", said)
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", said)
    if detail is None:
        return f"its process or its node is lost: {' '.join(said.split())}"
    cause = detail[1]
    if "connection error code 2" in cause:
        cause = "killed by a signal (SIGKILL: out of memory? SIGSEGV: see its last lines), or ended by os._exit"
    return f"process {pid[1] if pid else '?'} died: {cause}"


def store_bytes() -> int:
    """Room for what is under way between processes. Ray wants 75 MB at least, and goes to disk if /dev/shm has not that much."""
    modest = min(STORE_BYTES, psutil.virtual_memory().total // 10, int(psutil.disk_usage("/dev/shm").free * 0.9))
    return max(modest, ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES)


@contextmanager
def loopback_only() -> Iterator[None]:
    """Ray's servers listen on 127.0.0.1 alone. Ray has no option for it on Linux: an address of 127.0.0.1 is replaced."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
