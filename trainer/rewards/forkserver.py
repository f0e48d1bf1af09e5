"""Work that a model's text may make endless or fatal: each piece in a confined process, forked, so that it costs milliseconds.

The server is a plain interpreter that has imported what the work needs. It forks for each job and waits; the child is confined
(trainer/rewards/confine.py) and can start no process, so that its end is the end of all it did.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.rewards.confine import confine

_START_LIMIT = 60.0  # seconds until a server must be ready: sympy takes one, on a busy machine several
_PATIENCE = 30.0  # seconds beyond a job's limits until the server itself must have answered
_COMMAND = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd})"
_RESULT_FD = 3

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
    """The client's side. Any thread may call; one job runs at a time."""

    def __init__(self, module: str) -> None:
        """module: has a function ``main(fd)`` that calls ``serve``. Raises RuntimeError if it does not get ready."""
        ours, theirs = socket.socketpair()
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
        self._stream = ours.makefile("rb")
        self._lock = threading.Lock()
        self.closed = False
        refusal = self._ask(None, _START_LIMIT)
        if refusal is not None:
            self.close()
            raise RuntimeError(refusal)

    def run(self, job: Any, limits: Limits, stdin: str = "") -> Outcome:
        """One job, JSON, in a process of its own. Raises RuntimeError if the server, not the job, fails."""
        with self._lock:
            request = {"job": job, "stdin": stdin, "limits": [limits.cpu_seconds, limits.memory_bytes, limits.output_bytes]}
            return Outcome(*self._ask(request, limits.clock_seconds + _PATIENCE))

    def _ask(self, request: Any, patience: float) -> Any:
        self._socket.settimeout(patience)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._stream.readline()
        except OSError as error:  # a time-out is one
            self.close()
            raise RuntimeError(f"a server of confined processes is gone: {error}") from error
        if not line:
            self.close()
            raise RuntimeError("a server of confined processes is gone")
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        self.closed = True
        self._stream.close()
        self._socket.close()
        os.killpg(self._popen.pid, signal.SIGKILL)  # it is not reaped before the next line: the id is its own
        self._popen.wait()


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


def serve(fd: int, work: Work) -> None:
    """The server's side: a line of JSON in, a line out, until the other side is gone."""
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")
    null = os.open(os.devnull, os.O_RDWR)
    with suppress(ConnectionError):
        for line in stream:
            request = json.loads(line)
            if request is None:  # can this machine confine at all?
                probe = _run(lambda _: "", None, "", Limits(10.0, 1 << 32, 1 << 16), connection, null)
                answer: Any = None if probe.ending is None else probe.result or f"a confined process {probe.ending}"
            else:
                outcome = _run(work, request["job"], request["stdin"], Limits(*request["limits"]), connection, null)
                answer = [outcome.ending, outcome.result, outcome.output]
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _run(work: Work, job: Any, stdin: str, limits: Limits, connection: socket.socket, null: int) -> Outcome:
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "result")]
    try:
        with open(files[0], "w", encoding="utf-8", errors="replace", closefd=False) as text:
            text.write(stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            _child(work, job, limits, files, null)
        ending = _wait(child, limits.clock_seconds, connection)
        result, output = (_read(file, limits.output_bytes) for file in files[:0:-1])
        return Outcome(ending, result, output)
    finally:
        for file in files:
            os.close(file)


def _child(work: Work, job: Any, limits: Limits, files: list[int], null: int) -> None:
    """Never returns."""
    code = 1
    try:
        files = [os.dup(file) for file in files]  # none of them is one of the first four now
        for source, target in zip([files[0], files[1], null, files[2]], range(4), strict=True):
            os.dup2(source, target)
        os.closerange(_RESULT_FD + 1, 1 << 16)
        try:
            confine(cpu_seconds=limits.cpu_seconds, memory_bytes=limits.memory_bytes, output_bytes=limits.output_bytes)
        except OSError as error:
            os.write(_RESULT_FD, str(error).encode())
            raise
        result = work(job)
        sys.stdout.flush()
        os.write(_RESULT_FD, result.encode(errors="replace"))
        code = 0
    finally:  # whatever was raised: this process must not return into the server
        os._exit(code)


def _wait(child: int, seconds: float, connection: socket.socket) -> str | None:
    """How the child ended, None if well. It is killed when its time is over, or when nobody waits for it any more."""
    deadline = time.monotonic() + seconds
    with open(os.pidfd_open(child)) as ended:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(connection, select.POLLIN)  # nobody asks before the answer is there: this is the end of the stream
        ready = [file for file, _ in poll.poll(1000.0 * max(0.0, deadline - time.monotonic()))]
        if ended.fileno() not in ready:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not ready:
        return f"timed out after {seconds:g} s"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return None if code == 0 else f"ended with exit code {code}"


def _read(file: int, limit: int) -> str:
    """What a job has written, from the start: wherever its position is now."""
    return os.pread(file, limit, 0).decode(errors="replace")
