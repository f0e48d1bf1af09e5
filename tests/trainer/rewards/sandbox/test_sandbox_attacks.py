"""Hostile programs: none scores, none harms a process, an object or a file of the user, and limits hold."""

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.rewards.config import reward_config
from trainer.rewards.rules.code import score
from trainer.rewards.sandbox.forkserver import JobLimits, JobOutcome, fork_server

LIMITS = JobLimits(cpu_seconds=0.3, memory_bytes=1 << 29, output_bytes=1 << 16)
SECRET = "what the parquet holds"
ENVIRONMENT = "a key in the environment of another process"
libc = ctypes.CDLL(None, use_errno=True)


def run(code: str, limits: JobLimits = LIMITS) -> JobOutcome:
    return fork_server("trainer.rewards.sandbox.sandbox").run({"code": code}, limits)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A process, System V objects, a socket and a file of the user, which must survive."""
    directory = tmp_path_factory.mktemp("world")
    (directory / "truth.parquet").write_text(SECRET)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(str(directory / "socket"))
    bound.setblocking(False)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1600)
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 7, 4096)
    semaphore, queue = libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
    libc.semctl(semaphore, 0, 16, 5)  # SETVAL
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"KEY": ENVIRONMENT})
    names = {
        "pid": victim.pid,
        "segment": segment,
        "semaphore": semaphore,
        "queue": queue,
        "directory": directory,
        "us": os.getpid(),
    }
    yield SimpleNamespace(names=names, victim=victim, address=address, semaphore=semaphore, queue=queue, bound=bound)
    victim.kill()
    victim.wait()
    bound.close()
    libc.shmdt(ctypes.c_void_p(address))
    libc.shmctl(segment, 0, None)
    libc.semctl(semaphore, 0, 0)
    libc.msgctl(queue, 0, None)


def assert_intact(world: SimpleNamespace) -> None:
    assert world.victim.poll() is None
    assert ctypes.string_at(world.address, 4096) == b"\7" * 4096
    assert libc.semctl(world.semaphore, 0, 12) == 5  # GETVAL
    assert libc.msgctl(world.queue, 2, ctypes.create_string_buffer(256)) == 0  # IPC_STAT
    with pytest.raises(BlockingIOError):
        world.bound.recv(1)
    directory = world.names["directory"]
    assert {path.name: path.read_text() for path in directory.iterdir() if path.is_file()} == {"truth.parquet": SECRET}


PREAMBLE = """
import ctypes, fcntl, mmap, os, resource, signal, socket, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    result = getattr(libc, name)(*args)
    if result == -1 or result == 0xffffffffffffffff:
        raise OSError(ctypes.get_errno(), name)
    return result
def command(number, *args, on=None):
    r, w = os.pipe()
    return fcntl.fcntl(r if on is None else on, number, *args)
libc.shmat.restype = ctypes.c_void_p
here = socket.socketpair()
"""
REFUSED = [
    # signals
    "os.kill({pid}, 9)",
    "os.kill(os.getppid(), 9)",
    "os.kill(-1, 9)",
    "os.killpg(os.getpgid({pid}), 9)",
    "os.kill(os.getpid(), 9)",
    "signal.pthread_kill(threading.get_ident(), 9)",
    "call('sigqueue', {pid}, 9, 0)",
    "os.pidfd_open({pid})",
    "signal.pidfd_send_signal(0, 9)",
    "command(fcntl.F_SETOWN, {pid})",
    "command(fcntl.F_SETSIG, 9)",
    "command(15, (1).to_bytes(4, 'little') + ({pid}).to_bytes(4, 'little'))",  # F_SETOWN_EX
    "command(fcntl.F_SETFL, os.O_ASYNC)",
    "command(fcntl.F_SETLEASE, fcntl.F_RDLCK, on=os.open(os.__file__, 0))",
    "command(fcntl.F_NOTIFY, fcntl.DN_ACCESS, on=os.open(os.path.dirname(os.__file__), 0))",
    "fcntl.ioctl(here[0], 0x5452, b'\\1\\0\\0\\0')",  # FIOASYNC
    "fcntl.ioctl(here[0], 0x8901, ({pid}).to_bytes(4, 'little'))",  # FIOSETOWN
    "fcntl.ioctl(here[0], 0x8902, ({pid}).to_bytes(4, 'little'))",  # SIOCSPGRP
    "fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI
    "call('timer_create', 0, bytes(64), bytes(8))",
    # System V and POSIX objects
    "call('shmget', 0, 4096, 0o1600)",
    "ctypes.memset(call('shmat', {segment}, None, 0), 0, 4096)",
    "call('shmctl', {segment}, 0, None)",
    "call('semget', 0, 1, 0o1600)",
    "call('semctl', {semaphore}, 0, 0)",
    "call('semop', {semaphore}, bytes([0, 0, 255, 255, 0, 0]), 1)",
    "call('msgget', 0, 0o1600)",
    "call('msgctl', {queue}, 0, None)",
    "call('msgsnd', {queue}, (1).to_bytes(8, 'little') + b'x' * 8, 8, 0)",
    "call('msgrcv', {queue}, bytes(64), 8, 0, 0o4000)",
    "call('mq_open', b'/tandem', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "call('mq_unlink', b'/tandem')",
    "call('shm_open', b'/tandem', os.O_CREAT | os.O_RDWR, 0o600)",
    "__import__('_multiprocessing').SemLock(0, 1, 1, '/tandem', False)",
    # other processes
    "call('ptrace', 16, {pid}, 0, 0)",
    "call('process_vm_readv', {pid}, bytes(16), 1, bytes(16), 1, 0)",
    "call('process_vm_writev', {pid}, bytes(16), 1, bytes(16), 1, 0)",
    "open('/proc/{pid}/environ').read()",
    "open('/proc/{pid}/mem', 'rb')",
    "open('/proc/{us}/environ').read()",
    "open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "open(f'/proc/{{os.getppid()}}/maps').read()",
    "os.listdir(f'/proc/{{os.getppid()}}/fd')",
    "open(f'/proc/{{os.getppid()}}/fd/0')",
    "open('/proc/self/environ').read()",
    "open('/proc/self/mem', 'rb')",
    "resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
    "os.sched_setaffinity({pid}, {{0}})",
    "os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    # processes of one's own
    "os.fork()",
    "os.forkpty()",
    "os.posix_spawn('/bin/true', ['true'], {{}})",
    "os.execv('/bin/true', ['true'])",
    "call('syscall', 56 if os.uname().machine == 'x86_64' else 220, 0x10d0f00, 0, 0, 0, 0)",
    "call('daemon', 0, 0)",
    "os.setsid()",
    # limits
    "call('setrlimit', 0, bytes([255] * 16))",
    "call('setrlimit', 9, bytes([255] * 16))",
    "signal.setitimer(signal.ITIMER_PROF, 0)",
    "os.nice(-5)",
    "call('prctl', 1, 0, 0, 0, 0)",  # PR_SET_PDEATHSIG
    "call('prctl', 4, 1, 0, 0, 0)",  # PR_SET_DUMPABLE
    "call('prctl', 22, 0, 0, 0, 0)",  # PR_SET_SECCOMP
    "call('personality', 0x0040000)",
    "call('mlockall', 3)",
    "os.memfd_create('x')",
    "command(1031, 1 << 20)",  # F_SETPIPE_SZ
    "command(1033, 15, on=1)",  # F_ADD_SEALS
    "os.ftruncate(1, 1 << 40)",
    "os.posix_fallocate(1, 0, 1 << 40)",
    "call('syncfs', 1)",
    # files
    "open('{directory}/truth.parquet').read()",
    "os.open('{directory}/truth.parquet', os.O_RDONLY)",
    "os.listdir('{directory}')",
    "open('{directory}/new', 'w')",
    "os.open('{directory}', os.O_TMPFILE | os.O_RDWR)",
    "os.remove('{directory}/truth.parquet')",
    "os.rename('{directory}/truth.parquet', '{directory}/x')",
    "os.chmod('{directory}/truth.parquet', 0)",
    "os.mkfifo('{directory}/x')",
    "os.setxattr('{directory}/truth.parquet', 'user.x', b'')",
    "open('/etc/passwd').read()",
    "os.listdir(os.path.expanduser('~'))",
    "os.listdir('/tmp')",
    "os.listdir('/dev/shm')",
    "mmap.mmap(os.open('{directory}/truth.parquet', 0), 1)",
    "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
    "fcntl.lockf(1, fcntl.LOCK_EX)",
    "os.chroot('/')",
    "os.chdir('{directory}')",
    "call('open_by_handle_at', 0, bytes(64), 0)",
    # sockets
    "socket.socket(socket.AF_INET)",
    "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '{directory}/socket')",
    "here[0].sendto(b'x', '{directory}/socket')",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "here[0].sendmsg([b'x'])",
    "here[0].connect('{directory}/socket')",
    # the kernel
    "call('unshare', 0x10000000)",
    "call('setns', 0, 0)",
    "call('mount', b'x', b'/', b'tmpfs', 0, None)",
    "call('klogctl', 3, None, 0)",
    "call('reboot', 0)",
    "call('inotify_init1', 0)",
    "call('fanotify_init', 0, 0)",
    "call('vmsplice', 1, bytes(16), 1, 0)",
    "call('splice', 0, None, 1, None, 1, 0)",
    "call('sethostname', b'x', 1)",
    "__import__('time').clock_settime(0, 0)",
    "os.setuid(1)",
]


def test_every_attempt_is_refused_and_nothing_is_harmed(world: SimpleNamespace) -> None:
    """One process per attempt; the program continues, and its output shows that the attempt was made."""
    answers = {}
    for attempt in REFUSED:
        expression = attempt.format(**world.names)
        program = f"{PREAMBLE}\ntry:\n    print(repr({expression})[:99])\nexcept OSError as error:\n    print(error.errno)"
        outcome = run(program)
        answers[attempt] = outcome.output.strip() if outcome.ending is None else outcome.ending
    assert {
        attempt: answer for attempt, answer in answers.items() if answer not in {"1", "13", "38"}
    } == {}  # EPERM EACCES ENOSYS
    assert_intact(world)


def test_every_other_system_call_is_refused(world: SimpleNamespace) -> None:
    """By its number, also those that this kernel's headers do not name yet, and x32's. 335 and 336 no filter sees: they return
    from a probe, and kill where there is none.
    """
    program = f"""{PREAMBLE}
from trainer.rewards.sandbox.seccomp import _ALLOWED, _RULES, _OPENING, _THREADS
column = os.uname().machine == "aarch64"
known = {{numbers[column] for numbers in [*_ALLOWED.values(), *(rule.numbers for rule in [*_RULES, *_OPENING, *_THREADS])]}}
for number in [*range(600), *range(1 << 30, (1 << 30) + 600)]:
    if number not in known | {{335, 336}}:
        if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() not in (1, 38):
            print(number, ctypes.get_errno())
print("all")
"""
    assert run(program).output == "all\n"
    assert_intact(world)


# The limit of CPU time, where that is ignored the kernel's own, or on a busy machine that of the clock.
LATE = {"was killed by SIGPROF", "was killed by SIGKILL", "timed out after 1.6 s"}


@pytest.mark.parametrize(
    ("code", "endings", "output"),
    [
        ("import time\ntime.sleep(60)", {"timed out after 1.6 s"}, ""),
        ("import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass", {"timed out after 1.6 s"}, ""),
        ("pow(7, 10**9)", LATE, ""),
        ("sum(range(10**14))", LATE, ""),
        ("import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')", LATE, ""),
        ("'a' in ('b' * 10**8).join(['c'] * 3)\nwhile True: sorted(range(10**6))", LATE, ""),
        (
            "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
            LATE,
            "",
        ),
        (
            "import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass",
            LATE,
            "",
        ),
        ("x = bytearray(1 << 40)", {"ended with exit code 1"}, ""),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", {"ended with exit code 1", *LATE}, ""),
        ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(99)]", {"ended with exit code 1"}, ""),
        ("import os\nx = [os.pipe() for _ in range(99)]", {"ended with exit code 1"}, ""),
        ("def f(): return f()\nsys.setrecursionlimit(1 << 30)\nf()", {"ended with exit code 1", *LATE}, ""),
        (
            "class A:\n    def __getattr__(self, n): return getattr(self, n)\nA().x",
            {"ended with exit code 1", "was killed by SIGSEGV"},
            "",
        ),
        ("import ctypes\nctypes.string_at(0)", {"was killed by SIGSEGV"}, ""),
        (
            "import os\nos.abort()",
            {"was killed by SIGSEGV", "was killed by SIGABRT", "was killed by SIGILL", "ended with exit code 127"},
            "",
        ),
        ("while True: print('x' * 9999)", {"ended with exit code 1"}, "x"),
        ("while True: print('x' * 9999, file=sys.stderr)", LATE, ""),
        ("import os\nwhile os.write(3, b'x' * 9999): pass", {"ended with exit code 1"}, ""),
        ("import os\nwhile os.write(0, b'x' * 9999): pass", {"ended with exit code 1"}, ""),
        ("import os\nos.closerange(0, 99)\nprint(7)", {None, "ended with exit code 1"}, ""),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint(7)",
            {"timed out after 1.6 s"},
            "",
        ),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint(7)", {None}, "7\n"),
        ("import atexit\natexit.register(print, 8)\nprint(7)", {None}, "7\n8\n"),
        ("import atexit, time\natexit.register(time.sleep, 60)", {"timed out after 1.6 s"}, ""),
    ],
)
def test_limits_hold(code: str, endings: set[str | None], output: str) -> None:
    start = time.monotonic()
    outcome = run(code)
    assert outcome.ending in endings
    assert len(outcome.output) <= LIMITS.output_bytes and len(outcome.result) <= LIMITS.output_bytes
    assert outcome.output.startswith(output)
    assert time.monotonic() - start < LIMITS.clock_seconds + 2.0
    assert run("print(7)").output == "7\n"  # the server is as it was


THREADS = """
import threading, time
threading.stack_size(1 << 15)
started = 0
try:
    while started < 5000:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started)
"""


def test_number_of_threads_is_limited() -> None:
    assert run(THREADS).output == "63\n"  # and the first
    again = "import threading\nfor i in range(500):\n    t = threading.Thread(target=int)\n    t.start()\n    t.join()\nprint(i)"
    assert run(again).output == "499\n"  # one after the other, they are not counted


def test_no_process_outlives_the_server_or_its_job() -> None:
    server = fork_server("trainer.rewards.sandbox.sandbox")
    run("import os\ntry: os.fork()\nexcept OSError: pass")
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    assert children.read_text() == ""
    limits = JobLimits(cpu_seconds=30.0, memory_bytes=1 << 29, output_bytes=1 << 16)
    with (
        pytest.raises(RuntimeError, match="server of confined processes failed"),
        server.start({"code": "import time\ntime.sleep(60)"}, limits) as running,
    ):
        while not (pids := children.read_text().split()):
            time.sleep(0.01)
        time.sleep(0.2)  # until it is confined; from then on it dies with its parent
        os.kill(server.pid, 9)
        deadline = time.monotonic() + 5.0
        while (alive := is_alive(pids[0])) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive  # before the client has killed what is left
        running.wait()


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_server_never_holds_data_of_jobs() -> None:
    """A program can read all memory inherited by the fork: no other response or expected value may be in it."""
    mark = "".join(chr(97 + byte % 26) for byte in os.urandom(24))
    tests = {"inputs": [f"in{mark}"], "outputs": [f"out{mark}"]}
    calls = {"inputs": [[f"in{mark}"]], "outputs": [[f"out{mark}"]], "fn_name": "f"}
    asserts = [f"assert f('in{mark}') == 'out{mark}'"]
    config = reward_config().code
    for truth in (tests, calls, asserts):
        score(f"def f(x): return 'code{mark}'\nprint('code{mark}')", truth, config, seconds=30.0)
    for module in ("trainer.rewards.sandbox.sandbox", "trainer.rewards.sandbox.assertions"):
        assert mark.encode() not in memory(fork_server(module).pid)
    assert b"trainer.rewards.sandbox.sandbox" in memory(
        fork_server("trainer.rewards.sandbox.sandbox").pid
    )  # the search finds data that is present


def memory(pid: int) -> bytes:
    parts = []
    with open(f"/proc/{pid}/mem", "rb") as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(part, 16) for part in span.split("-"))
                file.seek(start)
                parts.append(file.read(end - start))
    return b"".join(parts)


ASSERTS = [
    "assert add(1, 2) == 3",
    "assert 10 == add(5, 5)",
    "assert abs(add(5, 5) - 10) < 1e-6",
    "assert 7 in [add(3, 4)]",
    "assert 7 in (add(3, 4), 8)",
    "assert 7 in add([7], [3])",
    "assert add(2, 2) in {4, 5}",
    "assert sorted([add(1, 1)]) == [2]",
    "assert not add(2, 3) != 5",
    "assert all(add(i, i) == 2 * i for i in range(5))",
    "assert all(map(lambda i: add(i, i) == 2 * i, range(5)))",
    "assert math.isclose(add(5, 5), 10)",
    "assert isinstance(add(1, 2), int) and add(1, 2) == 3",
    "assert str(add(1, 2)) == '3'",
    "assert [add(1, 2), add(2, 2)] == [3, 4]",
    "assert {'a': add(1, 2)} == {'a': 3}",
    "for a, b, c in [(1, 2, 3), (3, 4, 7)]: assert add(a, b) == c",
]
# One test that passes if any of them does, for speed.
ANY = f"""
held = []
for text in {ASSERTS!r}:
    try:
        exec(text)
        held.append(text)
    except Exception:
        pass
assert held or add is None
"""
FORMS = [
    [ANY],
    ASSERTS[:1],
    {"test": "def check(candidate):\n    try:\n        candidate(0, 0)\n    except Exception:\n        pass\n"
     "    assert candidate(1, 2) == 3\n    assert abs(candidate(5, 5) - 10) < 1e-6", "entry_point": "add"},
    {"test": "def check(candidate):\n    assert candidate(lambda: 3) == 4", "entry_point": "add"},
    {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"},
    {"inputs": ["1 2"], "outputs": ["3"]},
]  # fmt: skip
_, *PARTS = Path(__file__).with_name("forgeries.txt").read_text().split("\n=== ")
FORGERIES = {name: program for name, _, program in (part.partition("\n") for part in PARTS)}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forgery_scores(forgery: str) -> None:
    config = reward_config(code={"time_limit": 0.2, "memory_limit_mb": 512}).code
    for form in FORMS:
        assert score(FORGERIES[forgery], form, config, seconds=30.0)["score"] == 0.0, form


@pytest.mark.parametrize("forgery", ["numpy's protocol", *(name for name in FORGERIES if name.startswith("equal"))])
def test_numpy_comparisons_do_not_call_the_program(forgery: str) -> None:
    config = reward_config().code
    for asserts in ("assert np.array_equal(plus(1, 2), 3)", "import numpy\nassert numpy.array_equal([plus(1, 2)], [3])"):
        assert score(FORGERIES[forgery].replace("add(", "plus("), [asserts], config, seconds=30.0)["score"] == 0.0


def test_honest_programs_pass_the_forms() -> None:
    """Except the third, whose callback does not return the expected value."""
    answer = "def add(a, b=None):\n    return a() + 1 if callable(a) else a + b\n"
    answer += "if __name__ == '__main__':\n    print(add(*map(int, input().split())))"
    config = reward_config(code={"time_limit": 2.0}).code
    assert [score(answer, form, config, seconds=30.0)["score"] for form in FORMS] == [1.0] * len(FORMS)
    assert score(answer, ASSERTS, config, seconds=30.0)["score"] == 1.0
