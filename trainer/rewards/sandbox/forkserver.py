"""Fork server for untrusted evaluation: every job runs in a sandboxed process of its own, at a cost of milliseconds.

Problem: each test of a generated program needs a fresh process, and starting an interpreter that imports NumPy or SymPy takes
seconds; forking the controller instead would copy locks held by its threads (fork safety), its secrets and its GPU context. Idea:
a server process per module, a plain single-threaded interpreter that has imported what the work needs. It forks a child for each
job and waits for it. The child enters the sandbox (seccomp.py) and cannot start processes, so that its end is the
end of everything it did. The server never reads a job: texts travel in files that only the child opens, so no child finds other
jobs in the memory that it inherits. Cost: one idle process per module and scoring process, one fork per job.

Server and client exchange one message per job over a socket; timeouts are enforced by the server, which is the only parent.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trainer.rewards.sandbox.seccomp import Confinement, answer_thread_request, thread_requests

_START_LIMIT = 60.0
"""Seconds until a server must be ready: SymPy takes one to import, several on a busy machine."""
_PATIENCE = 30.0
"""Seconds after a job's limits until the server itself must have replied."""
_COMMAND = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd})"
_RESULT_FD, _JOB_FD, PEER_FD = 3, 4, 5
_MOST_THREADS = 64
"""Maximum number of threads of a job at any time."""
_CANCEL = b"cancel"

_SERVERS: dict[tuple[int, str], "ForkServer"] = {}
_STARTING = threading.Lock()

Work = Callable[[Any], str]
"""Function that processes a job: decoded JSON in, text out."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of a job. output_bytes: of its output and of its result, each."""

    cpu_seconds: float
    memory_bytes: int
    output_bytes: int

    @property
    def clock_seconds(self) -> float:
        """Wall-clock limit in seconds, for jobs that sleep or wait: generous, since a busy machine delays honest jobs too."""
        return 2.0 * self.cpu_seconds + 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Outcome of a job. ending: None if the work returned, else how its process ended. result: return value. output: stdout."""

    ending: str | None
    result: str
    output: str


class ForkServer:
    """Client of a server process. Any thread may call ``run``; one job runs at a time."""

    def __init__(self, module: str) -> None:
        """module: defines ``main(fd)``, which calls ``serve``. Raises RuntimeError if the server does not become ready."""
        # SEQPACKET keeps message boundaries: a request arrives together with the descriptors that were sent with it.
        client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = _COMMAND.format(path=sys.path, module=module, fd=server_end.fileno())
        # A new environment instead of a copy: no secret can be read by programs, and a fixed hash seed makes the iteration order
        # of sets, hence their output, reproducible.
        environment = {
            "PATH": os.defpath,
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with server_end:
            self._popen = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
                env=environment,
                cwd="/",
                process_group=0,
            )
        self._socket = client_end
        self._lock = threading.Lock()
        self.closed = False
        probe = JobLimits(cpu_seconds=10.0, memory_bytes=1 << 32, output_bytes=1 << 16)
        self._socket.settimeout(_START_LIMIT)
        outcome = self.run(None, probe)  # an empty job: fails now if this machine cannot sandbox
        if outcome.ending is not None:
            self.close()
            raise RuntimeError(outcome.result or f"a confined process {outcome.ending}")

    def run(self, job: Any, limits: JobLimits, stdin: str = "") -> JobOutcome:
        """Run a job (any JSON value) in a process of its own. Raises RuntimeError if the server, not the job, fails."""
        with self.start(job, limits, stdin) as running:
            return running.wait()

    def start(self, job: Any, limits: JobLimits, stdin: str = "", peer: socket.socket | None = None) -> "Running":
        """Start a job without waiting; the server is locked until the returned context exits. peer: PEER_FD of the job."""
        text = json.dumps(job)
        self._lock.acquire()
        running = Running(self, limits)
        try:
            running.make_files([text, stdin])
            files = [*running.files, *([] if peer is None else [peer.fileno()])]
            with self._failures():
                if self.closed:  # by another thread, while this one waited for the lock
                    raise ConnectionError("it has exited")
                request = json.dumps([limits.cpu_seconds, limits.memory_bytes, limits.output_bytes]).encode()
                socket.send_fds(self._socket, [request], files)
        except BaseException:
            running.close()
            raise
        return running

    def answer(self, patience: float) -> str | None:
        """Wait for the running job, at most ``patience`` seconds; how it ended, None for success."""
        with self._failures():
            self._socket.settimeout(patience)
            message = self._socket.recv(1 << 10)
            if not message:
                raise ConnectionError("it has exited")
        return json.loads(message)

    def cancel(self) -> None:
        with self._failures():
            self._socket.sendall(_CANCEL)

    def release(self) -> None:
        self._lock.release()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # also TimeoutError
            self.close()
            raise RuntimeError(f"a fork server of confined processes failed: {error}") from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        if self.closed:  # after wait() the process id may belong to another process
            return
        self.closed = True
        self._socket.close()
        os.killpg(self._popen.pid, signal.SIGKILL)  # safe: the id is not reused before wait() reaps the process
        self._popen.wait()


class Running:
    """A running job and its files. A context manager: leaving it ends the job."""

    def __init__(self, server: ForkServer, limits: JobLimits) -> None:
        self._server, self._limits = server, limits
        self._ended = False
        self.files: list[int] = []

    def make_files(self, texts: list[str]) -> None:
        """Create the job's files. texts: of the job and of its standard input."""
        # Anonymous files in memory instead of pipes: a program cannot block on a full pipe, and output is read after its end.
        for name in ("job", "stdin", "stdout", "result"):
            self.files.append(os.memfd_create(name))
        for file, text in zip(self.files[:2], texts, strict=True):
            with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as stream:
                stream.write(text)
            os.lseek(file, 0, os.SEEK_SET)

    def wait(self) -> JobOutcome:
        """Wait until the job has ended, by itself or at a limit."""
        ending = self._server.answer(self._limits.clock_seconds + _PATIENCE)
        self._ended = True
        output, result = (_read(file, self._limits.output_bytes) for file in self.files[2:])
        return JobOutcome(ending, result, output)

    def stop(self) -> JobOutcome:
        """End the job now, if it is still running."""
        self._server.cancel()
        return self.wait()

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self._server.release()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._ended and not self._server.closed:
            self._server.close()  # its pending reply would be taken for that of the next job
        self.close()


def fork_server(module: str) -> ForkServer:
    """This process's server for the module, started on first use; it ends with this process."""
    key = (os.getpid(), module)  # a forked child must not share its parent's socket
    with _STARTING:
        if key not in _SERVERS or _SERVERS[key].closed:
            _SERVERS[key] = ForkServer(module)
        return _SERVERS[key]


def close_fork_servers() -> None:
    """Terminate this process's servers now instead of at its exit."""
    with _STARTING:
        for pid, module in list(_SERVERS):
            server = _SERVERS.pop((pid, module))
            if pid == os.getpid() and not server.closed:
                server.close()


def serve(fd: int, work: Work, *, opens: bool = False) -> None:
    """Server loop: receive limits (JSON) with a job's files, reply how the job ended, until the client disconnects.

    opens: jobs may open files even if the kernel has no Landlock to limit them to modules; for work that does not execute
    model-generated programs.
    """
    connection = socket.socket(fileno=fd)
    null = os.open(os.devnull, os.O_RDWR)
    refusal: OSError | None = None
    try:
        requests = thread_requests()
        confinement = Confinement(threads=requests is not None, opens=opens)
    except OSError as error:
        refusal = error  # reported as the outcome of the client's first, empty job
    with suppress(ConnectionError):
        while message := (received := socket.recv_fds(connection, 1 << 10, PEER_FD))[0]:
            files = received[1]
            if message == _CANCEL:  # for a job that has just ended
                continue
            if refusal is not None:
                os.write(files[3], str(refusal).encode())
                ending: str | None = "cannot be confined"
            else:
                limits = JobLimits(*json.loads(message))
                if (child := os.fork()) == 0:
                    _child(work, limits, confinement, [*files, null])
                ending = _wait(child, limits.clock_seconds, connection, requests)
            for file in files:
                os.close(file)
            connection.sendall(json.dumps(ending).encode())


def _child(work: Work, limits: JobLimits, confinement: Confinement, files: list[int]) -> None:
    """Run a job in the forked child; never returns. files: job, stdin, stdout, result, optionally a peer, and the null device."""
    code = 1
    try:
        try:
            confinement.enter(cpu_seconds=limits.cpu_seconds, memory_bytes=limits.memory_bytes, output_bytes=limits.output_bytes)
        except OSError as error:
            os.write(files[3], str(error).encode())
            raise
        # First move all descriptors above 16, so that none is overwritten by dup2 before it has been placed.
        job, stdin, stdout, result, *peer, null = (fcntl.fcntl(file, fcntl.F_DUPFD, 1 << 4) for file in files)
        places = [stdin, stdout, null, result, job, *peer]
        for place, file in enumerate(places):
            os.dup2(file, place)
        os.closerange(len(places), 1 << 16)
        with open(_JOB_FD, encoding="utf-8") as text:  # closed before the work starts
            given = json.load(text)
        returned = "" if given is None else work(given)
        flush()
        os.write(_RESULT_FD, returned.encode(errors="replace"))
        code = 0
    finally:  # also for SystemExit and KeyboardInterrupt: the child must never return into the server's loop
        os._exit(code)


def flush() -> None:
    """Flush buffered output: os._exit skips it."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with suppress(ValueError):  # the program closed or detached it
                stream.flush()


def _wait(child: int, seconds: float, connection: socket.socket, requests: int | None) -> str | None:
    """Wait for the child; how it ended, None for success. Kill it at its time limit, or if the client cancels or disconnects."""
    deadline = time.monotonic() + seconds
    # A pidfd is readable when the process ends, so that one poll covers the child, its client and its requests for threads.
    with open(os.pidfd_open(child)) as ended:
        poll = select.poll()
        for file in (ended.fileno(), connection.fileno(), *([] if requests is None else [requests])):
            poll.register(file, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = [file for file, _ in poll.poll(1000.0 * max(0.0, left))]
            if requests is None or ready != [requests] or left <= 0.0:
                break
            answer_thread_request(requests, child, _MOST_THREADS)
        if ended.fileno() not in ready:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if connection.fileno() in ready and ended.fileno() not in ready:
            return "was cancelled"
    if ready in ([], [requests]):
        return f"timed out after {seconds:g} s"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return None if code == 0 else f"ended with exit code {code}"


def _read(file: int, limit: int) -> str:
    """Contents of a job's file from its start; the job may have moved the shared file position, hence pread."""
    return os.pread(file, limit, 0).decode(errors="replace")
