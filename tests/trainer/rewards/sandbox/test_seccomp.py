"""Operations that a confined process is refused. Each runs through the fork server, like a program that is scored."""

import ctypes.util
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.rewards.rules.math import LIMITS as MATHEMATICS
from trainer.rewards.sandbox.forkserver import ForkServer, JobLimits, JobOutcome, close_fork_servers, fork_server
from trainer.rewards.sandbox.seccomp import _ALLOWED, _AUDIT_ARCH, _OPENING, _RULES, _SECCOMP, _THREADS, _column, _program

LIMITS = JobLimits(cpu_seconds=0.5, memory_bytes=1 << 29, output_bytes=1 << 16)


def run(code: str, limits: JobLimits = LIMITS) -> JobOutcome:
    return fork_server("trainer.rewards.sandbox.sandbox").run({"code": code}, limits)


def evaluated(expression: str) -> str:
    """Value of the expression in a confined process, or the name of its exception."""
    outcome = run(
        f"import os, socket\ntry:\n    print({expression})\nexcept Exception as error:\n    print(type(error).__name__)"
    )
    assert outcome.ending is None, outcome
    return outcome.output.strip()


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_confined_process_has_no_socket(family: str) -> None:
    assert evaluated(f"socket.socket(socket.{family})") == "PermissionError"


def test_confined_process_cannot_reach_a_local_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert evaluated(f"socket.create_connection({address!r}, timeout=1)") == "PermissionError"
        socket.create_connection(address, timeout=1).close()  # reachable from outside the sandbox


@pytest.mark.parametrize(
    "expression",
    [
        "open('{dir}/new', 'w')",
        "open('{dir}/there', 'a')",
        "open('{dir}/there', 'r+')",
        "os.open('{dir}/there', os.O_RDONLY | os.O_TRUNC)",
        "os.truncate('{dir}/there', 0)",
        "os.remove('{dir}/there')",
        "os.rename('{dir}/there', '{dir}/elsewhere')",
        "os.link('{dir}/there', '{dir}/new')",
        "os.symlink('{dir}/there', '{dir}/new')",
        "os.mkdir('{dir}/new')",
        "os.rmdir('{dir}/empty')",
        "os.chmod('{dir}/there', 0)",
        "os.chown('{dir}/there', 1, 1)",
        "os.utime('{dir}/there')",
        "os.mkfifo('{dir}/new')",
    ],
)
def test_confined_process_cannot_change_files(expression: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    (tmp_path / "empty").mkdir()
    before = [(path.name, path.stat()) for path in sorted(tmp_path.iterdir())]
    assert evaluated(expression.format(dir=tmp_path)) == "PermissionError"
    assert [(path.name, path.stat()) for path in sorted(tmp_path.iterdir())] == before
    assert (tmp_path / "there").read_text() == "kept"


@pytest.mark.parametrize(
    "expression",
    [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.system('true') and 1 / 0",
        "__import__('subprocess').run(['true'])",
        "__import__('multiprocessing').Process().start()",
        "os.execv('/bin/true', ['true'])",
        "os.setsid()",
    ],
)
def test_confined_process_cannot_start_processes(expression: str) -> None:
    assert evaluated(expression) in {"PermissionError", "ZeroDivisionError"}


def test_calls_with_opaque_or_unknown_arguments_return_enosys() -> None:
    """clone3, whose flags lie in memory, and calls added by newer kernels. ENOSYS is 38."""
    call = "print(libc.syscall(n, 0, 0), ctypes.get_errno())"
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in (435, 451, 462):\n    {call}"
    assert run(code).output == "-1 38\n" * 3


def test_confined_process_cannot_signal_other_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        assert evaluated(f"os.kill({other.pid}, 9)") == "PermissionError"
        assert evaluated("os.kill(os.getppid(), 9)") == evaluated("os.kill(-1, 9)") == "PermissionError"
        assert evaluated(f"__import__('resource').prlimit({other.pid}, 0, (1, 1))") == "PermissionError"
        assert other.poll() is None
        other.kill()


def test_confined_process_may_have_threads() -> None:
    assert run("import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()").output == "7\n"


def test_confined_process_cannot_see_secrets_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "much")
    close_fork_servers()  # the next server inherits it
    assert evaluated("'SECRET_KEY' in os.environ") == "False"


LATE = "at a limit of time"  # of CPU time, where that is ignored the kernel's own, or on a busy machine that of the clock
BY_TIME = {"was killed by SIGPROF", "was killed by SIGKILL", "timed out after 2 s"}


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("while True: pass", LATE),
        ("import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')", LATE),
        ("import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass", LATE),
        ("import time\ntime.sleep(60)", "timed out after 2 s"),
        ("x = bytearray(1 << 40)", "ended with exit code 1"),
        ("x = []\nwhile True: x.append(bytearray(1 << 28))", "ended with exit code 1"),
        ("import ctypes\nctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("raise ValueError", "ended with exit code 1"),
        ("print('x' * (1 << 20))", "ended with exit code 1"),
    ],
)
def test_confined_process_is_killed_only_at_its_limits(code: str, ending: str) -> None:
    outcome = run(code)
    assert outcome.ending == ending or (ending == LATE and outcome.ending in BY_TIME)
    assert run("print(7)").output == "7\n"


def test_kernel_limit_ends_a_process_that_ignores_the_timer() -> None:
    """In the test above the wall-clock limit may come first."""
    assert evaluated("__import__('resource').getrlimit(0)") == "(1, 1)"


def test_confined_process_is_deterministic() -> None:
    code = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'}, hash('a'))"
    assert run(code).output == run(code).output


def test_unsupported_machine_raises() -> None:
    with pytest.raises(OSError, match="cannot be confined on riscv64, only on x86_64 and aarch64"):
        _column("riscv64")


def test_threads_take_turns_and_a_killed_server_is_replaced() -> None:
    outputs: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: outputs.update({i: run(f"print({i})").output})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(8)}
    os.kill(fork_server("trainer.rewards.sandbox.sandbox").pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="fork server of confined processes failed"):
        run("print(7)")
    assert run("print(7)").output == "7\n"


@pytest.fixture
def old_kernel() -> ForkServer:
    return fork_server("tests.trainer.rewards.old_kernel")


def test_no_file_can_be_opened_without_landlock(old_kernel: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    for path in (tmp_path / "there", os.__file__, "/etc/passwd", "/proc/self/environ", "/dev/stdin"):
        assert old_kernel.run({"code": f"open({str(path)!r})"}, LIMITS).ending == "ended with exit code 1"
    imports = "import numpy, asyncio, traceback, dataclasses, decimal, queue\nprint(numpy.linalg.inv(numpy.eye(3)).sum())"
    assert old_kernel.run({"code": imports}, LIMITS).output == "3.0\n"
    assert old_kernel.run({"code": "print(open(0).read())"}, LIMITS, "7").output == "7\n"


def test_kernel_without_thread_requests_allows_no_threads(old_kernel: ForkServer) -> None:
    code = "import threading\ntry:\n    threading.Thread(target=print).start()\nexcept RuntimeError:\n    print('none')"
    assert old_kernel.run({"code": code}, LIMITS).output == "none\n"


def test_kernel_that_cannot_grant_thread_requests_allows_no_threads() -> None:
    """Linux 5.0 to 5.4 deliver the requests and support no reply that lets a call continue."""
    server = fork_server("tests.trainer.rewards.old_kernel_requests")
    code = "import threading\ntry:\n    threading.Thread(target=print).start()\nexcept RuntimeError:\n    print('none')"
    assert server.run({"code": code}, LIMITS) == JobOutcome(None, "", "none\n")


def test_threads_that_cannot_be_counted_are_refused() -> None:
    server = fork_server("tests.trainer.rewards.no_proc")
    code = "import threading\ntry:\n    threading.Thread(target=print).start()\nexcept RuntimeError:\n    print('none')"
    assert server.run({"code": code}, LIMITS) == JobOutcome(None, "", "none\n")


def test_process_whose_parent_has_ended_is_not_confined() -> None:
    """PR_SET_PDEATHSIG has no effect if the parent died before the call."""
    code = """
import os, time
from trainer.rewards.sandbox.seccomp import Confinement
confinement, parent = Confinement(threads=False, opens=False), os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    try:
        confinement.enter(cpu_seconds=9.0, memory_bytes=1 << 32, output_bytes=1 << 16)
    except ProcessLookupError as error:
        print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30.0)
    assert done.stdout == "the fork server has exited\n"


def test_job_that_is_ended_early_is_not_reported_as_late() -> None:
    with fork_server("trainer.rewards.sandbox.sandbox").start({"code": "import time\ntime.sleep(60)"}, LIMITS) as running:
        assert running.stop().ending == "was cancelled"
    assert run("print(7)").output == "7\n"


def test_job_that_cannot_start_leaves_no_lock_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server("trainer.rewards.sandbox.sandbox")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TypeError, match="not JSON serializable"):
        server.start({"code": object()}, LIMITS)
    with monkeypatch.context() as patch:
        make, made = os.memfd_create, []
        patch.setattr(os, "memfd_create", lambda name: made.append(name) or (make(name) if len(made) < 3 else 1 / 0))
        with pytest.raises(ZeroDivisionError):
            server.start({"code": ""}, LIMITS)
    assert os.listdir("/proc/self/fd") == before
    assert server._lock.acquire(timeout=1.0)
    server.release()
    assert run("print(7)").output == "7\n"


def test_closed_server_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer("trainer.rewards.sandbox.sandbox")
    running = server.start({"code": "import time\ntime.sleep(60)"}, LIMITS)
    errors: list[str] = []

    def wait_for_the_lock() -> None:
        with pytest.raises(RuntimeError, match="failed: it has exited") as error:
            server.run({"code": ""}, LIMITS)
        errors.append(str(error.value))

    waiting = threading.Thread(target=wait_for_the_lock)
    waiting.start()
    server.close()
    monkeypatch.setattr(os, "killpg", lambda *pid: errors.append("killed another process"))
    running.close()
    waiting.join()
    server.close()
    assert errors == ["a fork server of confined processes failed: it has exited"]


def test_mathematics_works_without_landlock() -> None:
    server = fork_server("tests.trainer.rewards.old_kernel_mathematics")
    assert server.run(["(x+1)^2", "x^2+2x+1"], MATHEMATICS).result == "true"


SYSTEM_CALLS = _ALLOWED | {
    **{"open": (2, None), "openat": (257, 56), "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "socketpair": (53, 199)},
    **{
        "setrlimit": (160, 164),
        "sendto": (44, 206),
        "prlimit64": (302, 261),
        "setitimer": (38, 103),
        "prctl": (157, 167),
        "seccomp": (317, 277),
    },
    **{"landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446)},
}


def test_numbers_of_system_calls_are_those_of_libseccomp() -> None:
    """For both architectures, on either. libseccomp returns a negative number for a call that does not exist."""
    library = ctypes.util.find_library("seccomp")
    if library is None:
        pytest.skip("no libseccomp")
    resolve = ctypes.CDLL(library).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    named = {rule.numbers for rule in [*_RULES, *_OPENING, *_THREADS]} | {_SECCOMP}
    assert named <= set(SYSTEM_CALLS.values())
    for name, numbers in SYSTEM_CALLS.items():
        found = [resolve(_AUDIT_ARCH[machine], name.encode()) for machine in ("x86_64", "aarch64")]
        assert [number if number >= 0 else None for number in found] == [*numbers], name


def test_filter_of_the_other_architecture_decides_equally() -> None:
    """The filter is interpreted for every number: calls allowed with any arguments are exactly the list."""
    for column, machine in enumerate(_AUDIT_ARCH):
        program = _program(column, [*_RULES, *_OPENING, *_THREADS])
        allowed = {n for n in range(600) if decide(program, n, _AUDIT_ARCH[machine], [0x7FFFFFFF] * 6) == "allowed"}
        assert allowed == {numbers[column] for numbers in _ALLOWED.values()} - {None}
        assert decide(program, 0, 0xC0000001, [0] * 6) == "killed"
        number = {name: numbers[column] for name, numbers in SYSTEM_CALLS.items()}
        for name, arguments, allowed_too in [
            ("openat", [0, 0, os.O_CLOEXEC], True),
            ("openat", [0, 0, os.O_WRONLY], False),
            ("fcntl", [0, fcntl.F_GETFL, 0xFFFF], True),
            ("fcntl", [0, fcntl.F_SETFL, os.O_NONBLOCK], True),
            ("fcntl", [0, fcntl.F_SETFL, os.O_ASYNC], False),
            ("fcntl", [0, fcntl.F_SETOWN, 1], False),
            ("clone", [0x3D0F00], True),
            ("clone", [0x11], False),
            ("prlimit64", [0, 7, 0], True),
            ("prlimit64", [0, 7, 1 << 32], False),
            ("prlimit64", [0, 3, 1 << 32], True),
            ("prlimit64", [1, 3, 1 << 32], False),
            ("setrlimit", [3], True),
            ("setrlimit", [0], False),
            ("sendto", [0, 0, 0, 0, 0], True),
            ("sendto", [0, 0, 0, 0, 1 << 40], False),
            ("socketpair", [1, 1], True),
            ("socketpair", [1, 2], False),
            ("setitimer", [0], True),
            ("setitimer", [2], False),
        ]:
            verdict = decide(program, number[name] or 0, _AUDIT_ARCH[machine], [*arguments, *[0] * 6])
            assert (verdict == "allowed") == allowed_too, (machine, name, arguments)


def decide(program: bytes, number: int, arch: int, arguments: list[int]) -> str:
    """Interpret the BPF instructions as the kernel does."""
    data = struct.pack("<iIQ6Q", number, arch, 0, *arguments[:6])
    steps = [*struct.iter_unpack("HBBI", program)]
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x06:
            return {0x7FFF0000: "allowed", 0x80000000: "killed"}.get(operand, "refused")
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += if_true if holds else if_false
