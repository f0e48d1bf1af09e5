"""Fork server for untrusted evaluation: every job runs in a confined process of its own, at a cost of milliseconds.

The server is a plain interpreter that has imported what the work needs. It forks for each job and waits; the child is confined
(trainer/rewards/confine.py) and can start no process, so that its end is the end of all it did. The server never reads a job: the
text travels in files that only the child opens, so a child cannot find what other jobs held in the memory that it inherits.
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

from trainer.rewards.confine import Confinement, answer_thread_request, thread_requests

_START_LIMIT = 60.0  # seconds until a server must be ready: sympy takes one, on a busy machine several
_PATIENCE = 30.0  # seconds beyond a job's limits until the server itself must have answered
_COMMAND = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd})"
_RESULT_FD, _JOB_FD, PEER_FD = 3, 4, 5
_MOST_THREADS = 64  # of a job, at one time
_CANCEL = b"cancel"

_SERVERS: dict[tuple[int, str], "ForkServer"] = {}
_STARTING = threading.Lock()

Work = Callable[[Any], str]
"""What a job is given to: JSON in, text out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """cpu_seconds: on the clock a job may take twice as many and one more. output_bytes: of its output, and of its result."""

    cpu_seconds: float
    memory_bytes: int
    output_bytes: int

    @property
    def clock_seconds(self) -> float:
        return 2.0 * self.cpu_seconds + 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """ending: None if the work returned, else how its process ended. result: what it returned. output: what it printed."""

    ending: str | None
    result: str
    output: str


class ForkServer:
    """The client's side. Any thread may call ``run``; one job runs at a time."""

    def __init__(self, module: str) -> None:
        """module: has a function ``main(fd)`` that calls ``serve``. Raises RuntimeError if it does not get ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message arrives whole, with its files
        command = _COMMAND.format(path=sys.path, module=module, fd=theirs.fileno())
        environment = {
            "PATH": os.defpath,
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,  # no secret of ours, and the same order of sets each time
                cwd="/",
                process_group=0,
            )
        self._socket = ours
        self._lock = threading.Lock()
        self.closed = False
        probe = Limits(cpu_seconds=10.0, memory_bytes=1 << 32, output_bytes=1 << 16)
        self._socket.settimeout(_START_LIMIT)
        outcome = self.run(None, probe)  # can this machine confine at all?
        if outcome.ending is not None:
            self.close()
            raise RuntimeError(outcome.result or f"a confined process {outcome.ending}")

    def run(self, job: Any, limits: Limits, stdin: str = "") -> Outcome:
        """One job, JSON, in a process of its own. Raises RuntimeError if the server, not the job, fails."""
        with self.start(job, limits, stdin) as running:
            return running.wait()

    def start(self, job: Any, limits: Limits, stdin: str = "", peer: socket.socket | None = None) -> "Running":
        """The same without waiting. The lock is held until the job's ``with`` ends. peer: the job's descriptor PEER_FD."""
        text = json.dumps(job)
        self._lock.acquire()
        running = Running(self, limits)
        try:
            running.make_files([text, stdin])
            files = [*running.files, *([] if peer is None else [peer.fileno()])]
            with self._failures():
                if self.closed:  # while this thread waited for the lock
                    raise ConnectionError("it has ended")
                request = json.dumps([limits.cpu_seconds, limits.memory_bytes, limits.output_bytes]).encode()
                socket.send_fds(self._socket, [request], files)
        except BaseException:
            running.close()
            raise
        return running

    def answer(self, patience: float) -> str | None:
        """How the job that runs has ended, None if well."""
        with self._failures():
            self._socket.settimeout(patience)
            message = self._socket.recv(1 << 10)
            if not message:
                raise ConnectionError("it has ended")
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
        except OSError as error:  # a time-out is one
            self.close()
            raise RuntimeError(f"a server of confined processes is gone: {error}") from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        if self.closed:  # its process id may be another process's by now
            return
        self.closed = True
        self._socket.close()
        os.killpg(self._popen.pid, signal.SIGKILL)  # it is not reaped before the next line: the id is its own
        self._popen.wait()


class Running:
    """A job that a server runs. Its files are made here, and read here once it has ended. A context: leaving it ends the job."""

    def __init__(self, server: ForkServer, limits: Limits) -> None:
        self._server, self._limits = server, limits
        self._ended = False
        self.files: list[int] = []

    def make_files(self, texts: list[str]) -> None:
        """texts: of the job and of its standard input."""
        for name in ("job", "stdin", "stdout", "result"):
            self.files.append(os.memfd_create(name))
        for file, text in zip(self.files[:2], texts, strict=True):
            with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as stream:
                stream.write(text)
            os.lseek(file, 0, os.SEEK_SET)

    def wait(self) -> Outcome:
        """Until it has ended, by itself or at a limit."""
        ending = self._server.answer(self._limits.clock_seconds + _PATIENCE)
        self._ended = True
        output, result = (_read(file, self._limits.output_bytes) for file in self.files[2:])
        return Outcome(ending, result, output)

    def stop(self) -> Outcome:
        """End it now, unless it has ended already."""
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
            self._server.close()  # its answer would be taken for that of the next job
        self.close()


def fork_server(module: str) -> ForkServer:
    """This process's server for the module: started with its first use, it ends with the process."""
    key = (os.getpid(), module)  # a fork must not share its parent's
    with _STARTING:
        if key not in _SERVERS or _SERVERS[key].closed:
            _SERVERS[key] = ForkServer(module)
        return _SERVERS[key]


def close_fork_servers() -> None:
    """End this process's servers now, not with the process."""
    with _STARTING:
        for pid, module in list(_SERVERS):
            server = _SERVERS.pop((pid, module))
            if pid == os.getpid() and not server.closed:
                server.close()


def serve(fd: int, work: Work, *, opens: bool = False) -> None:
    """The server's side: limits in JSON with a job's files in, how it ended out, until the client is gone. opens: jobs may open
    files also where a kernel without Landlock cannot limit them to modules; for work that runs no program of a model's.
    """
    connection = socket.socket(fileno=fd)
    null = os.open(os.devnull, os.O_RDWR)
    refusal: OSError | None = None
    try:
        requests = thread_requests()
        confinement = Confinement(threads=requests is not None, opens=opens)
    except OSError as error:
        refusal = error
    with suppress(ConnectionError):
        while message := (received := socket.recv_fds(connection, 1 << 10, PEER_FD))[0]:
            files = received[1]
            if message == _CANCEL:  # of a job that has ended by now
                continue
            if refusal is not None:
                os.write(files[3], str(refusal).encode())
                ending: str | None = "cannot be confined"
            else:
                limits = Limits(*json.loads(message))
                if (child := os.fork()) == 0:
                    _child(work, limits, confinement, [*files, null])
                ending = _wait(child, limits.clock_seconds, connection, requests)
            for file in files:
                os.close(file)
            connection.sendall(json.dumps(ending).encode())


def _child(work: Work, limits: Limits, confinement: Confinement, files: list[int]) -> None:
    """Never returns. files: job, standard input, output, result, perhaps a peer, and the null device."""
    code = 1
    try:
        try:
            confinement.enter(cpu_seconds=limits.cpu_seconds, memory_bytes=limits.memory_bytes, output_bytes=limits.output_bytes)
        except OSError as error:
            os.write(files[3], str(error).encode())
            raise
        job, stdin, stdout, result, *peer, null = (fcntl.fcntl(file, fcntl.F_DUPFD, 1 << 4) for file in files)
        places = [stdin, stdout, null, result, job, *peer]
        for place, file in enumerate(places):
            os.dup2(file, place)
        os.closerange(len(places), 1 << 16)
        with open(_JOB_FD, encoding="utf-8") as text:  # closed before the work begins
            given = json.load(text)
        answer = "" if given is None else work(given)
        flush()
        os.write(_RESULT_FD, answer.encode(errors="replace"))
        code = 0
    finally:  # whatever was raised: this process must not return into the server
        os._exit(code)


def flush() -> None:
    """Write what this process has printed and holds back."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with suppress(ValueError):  # it is closed or detached
                stream.flush()


def _wait(child: int, seconds: float, connection: socket.socket, requests: int | None) -> str | None:
    """How the child ended, None if well. It is killed when its time is over, or when its client cancels it or is gone."""
    deadline = time.monotonic() + seconds
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
        return f"died of {signal.Signals(-code).name}"
    return None if code == 0 else f"ended with exit code {code}"


def _read(file: int, limit: int) -> str:
    """What a job has written, from the start: wherever its position is now."""
    return os.pread(file, limit, 0).decode(errors="replace")
