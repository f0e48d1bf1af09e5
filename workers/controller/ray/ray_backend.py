"""Ray backend: workers as Ray actors, one per slot. In workers/, only this file and ray_places.py import ray."""

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
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from workers.controller.environment import import_path, set_environment
from workers.controller.group import Backend, Replies, Transport, WorkerGroup, WorkerInfo
from workers.controller.logs import last_lines, tail, write_to
from workers.controller.ports import hold_port
from workers.controller.process_inspection import ProcessState, RankState, examine
from workers.controller.ray.guard import Guard
from workers.controller.ray.ray_places import SLOT, Places
from workers.controller.ray.ray_session import MARK, SessionDir, end_processes, family
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Arguments, Call, Executor, Failure, PackedMessage, pack, unpack
from workers.controller.stacks import enable_stack_reports
from workers.controller.stop import die_with_parent, handlers_kept, shielded

INLINE_BYTES = 64 * 1024  # larger messages go through the object store; Ray sends up to 100 KB with the call itself
STORE_BYTES = 8 * 2**30  # size limit of the object store, see store_bytes
SHUTDOWN_SECONDS = 20.0
DEATH_SECONDS, NODE_DEATH_SECONDS = 1.0, 40.0  # longest delay until Ray reports the death of a process, of a node
# In messages of gloo and NCCL.
PEER_LOST = re.compile(r"[Cc]onnection (reset|closed) by peer|[Bb]roken pipe|remote process exited")
EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")  # of a process that died while its node lives
IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` for the processes that it starts
HOMES_SECONDS, NODE_SECONDS = 2.0, 30.0  # limits for locating a group's ranks, and for inspecting processes of another node


class RayBackend(Backend):
    """Backend with Ray actors, on a Ray instance of its own or on a running cluster.

    Starts an instance on this machine, which listens on loopback only and uses directories of its own. Joins the running
    cluster instead if ``nnodes`` > 1, if ``ray_init`` has an address, or if this is a job of `ray job submit`; then it starts
    and ends nothing but its workers. Values in ``ray_init`` take precedence over those chosen here. Workers write to
    <run_dir>/logs/rank_<rank>_<group>.log on their node, unless log_to_driver is set.
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
        """join_seconds: how long a cluster that is joined may take to become large enough."""
        assert threading.current_thread() is threading.main_thread(), "Ray's processes end with the thread that starts them"
        self._run_dir = Path(run_dir).absolute()
        self._logs = None if ray_init.get("log_to_driver") else self._run_dir / "logs"
        self._opened = ExitStack()
        address = ray_init.get("address") or ("auto" if nnodes > 1 or IN_JOB in os.environ else "local")
        self._joined = address != "local"
        self._places = Places(join_seconds if self._joined else None)
        environment = {
            "PYTHONPATH": os.pathsep.join(import_path()),
            # ``launch`` sets CUDA_VISIBLE_DEVICES to all GPUs of the run, see Place.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        try:
            with handlers_kept():
                if self._joined:
                    self._join({**ray_init, "address": address}, environment)
                else:
                    self._start(ray_init, environment, n_gpus_per_node, device)
        # No `with` block has been entered yet, so __exit__ will not end what was started.
        except BaseException:
            self.shutdown()
            raise

    def _start(self, ray_init: Mapping[str, Any], environment: Mapping[str, str], n_slots: int, device: str) -> None:
        """Start an instance. Takes 2.1 s on two idle cores, half of it for a dashboard that Ray starts without being asked to."""
        # Callbacks run in reverse order: Ray ends, then the guard is dismissed, then the directories are removed.
        session = SessionDir(self._run_dir)
        self._opened.callback(session.remove)
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "WARNING",
            "num_cpus": n_slots,  # workers take none; Ray prestarts this number of processes, in parallel
            "object_store_memory": store_bytes(),
            "object_spilling_directory": str(session.spill),
            "_temp_dir": str(session.path),
            "job_config": Job(),
            **ray_init,
            "address": "local",
        }
        slots = {SLOT: n_slots} if device == "cpu" else {}
        options["resources"] = slots | (ray_init.get("resources") or {})
        # Off: Ray's memory monitor ends workers when the machine, with the processes of all users, is 95 % full.
        options["_system_config"] = {"memory_monitor_refresh_ms": 0} | (ray_init.get("_system_config") or {})
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces its token at every start
        self._opened.callback(Guard(session.places).dismiss)
        self._opened.callback(end_ray, session.places)
        with set_environment({**environment, MARK: session.mark}), loopback_only():
            ray.init(**options)

    def _join(self, ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Connect to a running cluster."""
        runtime_env = ray_init.get("runtime_env") or {}
        runtime_env = {**runtime_env, "env_vars": {**environment, **(runtime_env.get("env_vars") or {})}}
        job = {"job_config": Job(), "log_to_driver": False, "logging_level": "WARNING"}
        options = {**job, **ray_init, "runtime_env": runtime_env}
        # Before the connection: one that fails halfway is closed too.
        self._opened.callback(ray.shutdown)
        # Overriding the job's runtime_env keeps its PYTHONPATH, which is part of the import path above.
        with set_environment({"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}):
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
        if pool.room is not None:  # a room's slots are assigned here: Ray would put two halves of a pool onto one GPU
            slot = {}
        actors: list[Any] = []
        for rank in range(pool.world_size):
            node, _ = pool.place(rank)
            strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=node)
            actors.append(
                ray.remote(RayExecutor).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy, **slot).remote()
            )
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if pool.device == "cpu" else {}
        ship = Shipper()
        arguments = (args, kwargs)
        homes = [actor.home.remote() for actor in actors]
        logs = [self._logs and self._logs / f"rank_{rank}_{name}.log" for rank in range(pool.world_size)]
        address = actors[0].address.remote()  # a reference: Ray passes the value on when it is there, nothing waits here
        for rank, actor in enumerate(actors):
            node, local_rank = pool.place(rank)
            standing = (rank, pool.world_size, local_rank, node, pool.n_parts)
            environment = {**threads, **place.environment(node), **(env or {})}
            actor.launch.remote(standing, address, logs[rank], environment, ship(worker), ship(arguments))
        # The slots of a room belong to all pools in it: they outlive this group.
        own_place = place.group if pool.room is None else None
        group = WorkerGroup(name, pool.world_size, RayTransport(actors, Ranks(homes, logs), own_place))
        self._opened.callback(group.shutdown)
        return group

    def shutdown(self) -> None:
        with shielded():
            self._opened.close()


def end_ray(places: Collection[str]) -> None:
    """End the Ray instance of this run, with everything that it or its workers started. places: of the session."""
    # Found before the shutdown: descendants cannot be recognised once their parents are gone.
    known = family(places)
    killer = threading.Timer(SHUTDOWN_SECONDS, end_processes, (places, known))
    killer.start()
    ray.shutdown()  # waits for its daemons without limit, also for one that is stopped
    killer.cancel()
    end_processes(places, known)


class Job(JobConfig):
    """Job whose workers search the import path of this process.

    Ray puts the working directory in front of it. A directory `workers` or `trainer` of the user's would be found there, although
    this process, started by a console script, does not search it.
    """

    def _serialize(self) -> str:  # what Ray declares; it returns bytes
        path = import_path()
        self._py_driver_sys_path = [folder for folder in self._py_driver_sys_path if folder in path]
        return super()._serialize()


class RayExecutor(Executor):
    """Actor that holds one worker. It imports the worker in ``launch``, after the environment is set.

    An environment through Ray's runtime_env would cost 0.65 s, because prestarted processes could not be used.
    """

    def address(self) -> tuple[str, int]:
        """(host, port) at which the ranks meet. The port stays reserved while this process lives."""
        self._held = hold_port()
        return ray.util.get_node_ip_address(), self._held.getsockname()[1]

    def home(self) -> tuple[str, int]:
        """(Ray's node id, process id) of this worker. From now on it answers for its stacks."""
        enable_stack_reports()
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def launch(
        self,
        standing: tuple[int, int, int, int, int],
        address: tuple[str, int],
        log_path: Path | None,
        env: Mapping[str, str],
        worker: PackedMessage,
        arguments: PackedMessage,
    ) -> PackedMessage | Failure:
        """Prepare the process and build the worker.

        standing: (rank, world size, local rank, node rank, number of groups). address: of rank 0. log_path: None leaves the
        output where it is.
        """
        die_with_parent(os.getppid())
        if log_path is not None:
            write_to(log_path)
        # Before start, which imports the worker: libraries read their variables when they are loaded.
        os.environ.update(env)
        rank, world_size, local_rank, node, n_groups = standing
        info = WorkerInfo(rank, world_size, local_rank, node, *address, n_groups)
        return without_exception(self.start(info, worker, arguments))

    def call(self, role: str | None, method: str, wanted: bool, arguments: PackedMessage) -> PackedMessage | Failure:
        return without_exception(super().call(role, method, wanted, arguments))


class Shipper:
    """Packs each value once, and puts a large one into the object store once, for any number of ranks.

    Values are recognised by identity, so they must outlive the Shipper.
    """

    def __init__(self, limit: float | None = None) -> None:
        """limit: seconds that the store may take for one value, then TimeoutError is raised; None: no limit."""
        self._limit = limit
        self._shipped: dict[int, PackedMessage | ray.ObjectRef] = {}

    def __call__(self, value: Any) -> PackedMessage | ray.ObjectRef:
        if id(value) not in self._shipped:
            message = pack(value)
            self._shipped[id(value)] = self._put(message) if message.nbytes > INLINE_BYTES else message
        return self._shipped[id(value)]

    def _put(self, message: PackedMessage) -> ray.ObjectRef:
        """Put a message into the object store, from a thread that can be abandoned.

        ray.put has no timeout, and ignores signals while its node does not answer.
        """
        put = Future[ray.ObjectRef]()
        threading.Thread(target=self._work, args=(put, message), daemon=True).start()
        return put.result(self._limit)

    @staticmethod
    def _work(put: Future[ray.ObjectRef], message: PackedMessage) -> None:
        try:
            put.set_result(ray.put(message))
        except Exception as error:  # raised by put.result() in the thread that waits
            put.set_exception(error)


class RayTransport(Transport):
    def __init__(self, actors: Sequence[Any], ranks: Ranks, place: PlacementGroup | None) -> None:
        """place: placement group that is removed when the workers end; None: other groups use it."""
        self._actors = actors
        self._ranks = ranks
        self._place = place

    def send(
        self, call: Call[Any], arguments: Mapping[int, Arguments], wanted: Collection[int], seconds: float | None
    ) -> Replies:
        ship = Shipper(seconds)
        refs = {}
        for rank, own in arguments.items():
            try:
                packed = ship(own)
            except TimeoutError:
                raise TimeoutError("Ray's object store does not take the batch") from None
            refs[rank] = self._actors[rank].call.remote(call.role, call.method, rank in wanted, packed)
        return RayReplies(call.method, refs, self._ranks)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._place is not None:
            remove_placement_group(self._place)


class Ranks:
    """Locations and logs of a group's ranks."""

    def __init__(self, homes: Sequence[ray.ObjectRef], logs: Sequence[Path | None]) -> None:
        """homes: results of ``RayExecutor.home``, perhaps not there yet."""
        self._homes = list(homes)
        self.logs = logs

    def examine(self, missing: Collection[int]) -> list[RankState]:
        """State of every rank, inspected on its own node; on this node without Ray, which may be the cause of the hang."""
        known = self._known()
        here = ray.get_runtime_context().get_node_id()
        found: dict[int, tuple[ProcessState, ...]] = {}
        for node in {node for node, _ in known.values()}:
            ranks = [rank for rank, (home, _) in known.items() if home == node]
            pids = [known[rank][1] for rank in ranks]
            # strict=False: a node that does not answer gives an empty list.
            found |= dict(zip(ranks, examine(pids) if node == here else examine_on(node, pids), strict=False))
        return [
            RankState(rank, rank not in missing, found.get(rank, ()), log, last_lines(log)) for rank, log in enumerate(self.logs)
        ]

    def _known(self) -> dict[int, tuple[str, int]]:
        """{rank: result of ``RayExecutor.home``} of the ranks that lived long enough to return it."""
        arrived, _ = ray.wait(list(self._homes), num_returns=len(self._homes), timeout=HOMES_SECONDS)
        known = {}
        for ref in arrived:
            with suppress(ray.exceptions.RayError):
                known[self._homes.index(ref)] = ray.get(ref)
        return known


def examine_on(node: str, pids: Sequence[int]) -> list[tuple[ProcessState, ...]]:
    """``examine`` on another node; empty if the node does not answer."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        return ray.get(ray.remote(examine).options(num_cpus=0, scheduling_strategy=there).remote(pids), timeout=NODE_SECONDS)
    except ray.exceptions.RayError:
        return []


class RayReplies(Replies):
    """Results of a call on Ray actors."""

    def __init__(self, method: str, refs: Mapping[int, ray.ObjectRef], ranks: Ranks) -> None:
        """refs: by rank."""
        super().__init__(refs)
        self._method = method
        self._refs = dict(refs)
        self._ranks = ranks

    def receive(self, timeout: float | None) -> tuple[int, Failure] | None:
        failures = self._take_in(timeout)
        return self._first_cause(failures) if failures else None

    @staticmethod
    def wait(several: Sequence[RayReplies], timeout: float | None) -> list[RayReplies]:
        arrived = arrived_of([ref for replies in several for ref in replies._refs.values()], timeout)
        return [replies for replies in several if not arrived.isdisjoint(replies._refs.values())]

    def examine(self) -> list[RankState]:
        return self._ranks.examine(self.missing)

    def _first_cause(self, failures: list[tuple[int, Failure]]) -> tuple[int, Failure]:
        """The failure to report: that of a rank that died if there is one, else the first that arrived.

        A rank that dies takes others with it, and their failures may arrive first: wait DEATH_SECONDS for news of a death. If
        all failures are about a lost peer, wait NODE_DEATH_SECONDS, which Ray takes to notice that a node is lost.
        """
        peer_lost = all(PEER_LOST.search(failure.message) for _, failure in failures)
        deadline = time.monotonic() + (NODE_DEATH_SECONDS if peer_lost else DEATH_SECONDS)
        while not any(map(died, failures)) and self._refs and (remaining := deadline - time.monotonic()) > 0:
            failures = failures + self._take_in(remaining)
        return min(failures, key=lambda failed: (not died(failed), failures.index(failed)))

    def _take_in(self, timeout: float | None) -> list[tuple[int, Failure]]:
        """Record what has arrived, after at least one result or ``timeout`` seconds. Returns the failures among it."""
        arrived, now = arrived_of(list(self._refs.values()), timeout), time.time()
        failures = []
        for rank in [rank for rank, ref in self._refs.items() if ref in arrived]:
            result = self._received(rank, self._refs.pop(rank))
            if isinstance(result, Failure):
                failures.append((rank, result))
            else:
                self.add(rank, unpack(result), now)
        return failures

    def _received(self, rank: int, ref: ray.ObjectRef) -> PackedMessage | Failure:
        try:
            result: PackedMessage | Failure = ray.get(ref, timeout=NODE_SECONDS)  # it is there, unless its node is lost
        except ray.exceptions.RayError as error:
            log, alone = tail(self._ranks.logs[rank]), EXIT_DETAIL.search(str(error)) is not None
            return Failure(self._method, cause_of_death(str(error)), log, error, process_died=alone)
        return result


def arrived_of(refs: list[Any], timeout: float | None) -> set[ray.ObjectRef]:
    """The results that have arrived, after at least one of them or ``timeout`` seconds."""
    arrived, _ = ray.wait(refs, num_returns=1, timeout=timeout)
    if arrived and len(refs) > 1:
        # The first call returned one result; take all others that are there, without waiting.
        arrived, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    return set(arrived)


def died(failed: tuple[int, Failure]) -> bool:
    """Whether the process died, rather than a call in it."""
    return isinstance(failed[1].error, ray.exceptions.RayError)


def without_exception(answer: PackedMessage | Failure) -> PackedMessage | Failure:
    """Remove the exception object, which stays in its process: it may hold anything."""
    return replace(answer, error=None) if isinstance(answer, Failure) else answer


def cause_of_death(message: str) -> str:
    """Ray's message about a dead actor, in one line."""
    pid = re.search(r"pid: (\d+)", message)
    detail = EXIT_DETAIL.search(message)
    if detail is None:
        return f"its process or its node is lost: {' '.join(message.split())}"
    cause = detail[1]
    if "connection error code 2" in cause:
        cause = "killed by a signal (SIGKILL: out of memory? SIGSEGV: see its last lines), or ended by os._exit"
    return f"process {pid[1] if pid else '?'} died: {cause}"


def store_bytes() -> int:
    """Size of the object store, which holds what is in transit between processes.

    Ray needs at least 75 MB, and uses the disk if /dev/shm has less space than the store's size.
    """
    modest = min(STORE_BYTES, psutil.virtual_memory().total // 10, int(psutil.disk_usage("/dev/shm").free * 0.9))
    return max(modest, ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES)


@contextmanager
def loopback_only() -> Iterator[None]:
    """Let Ray's servers listen on 127.0.0.1 only. Ray has no option for it on Linux, where it replaces that address."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
