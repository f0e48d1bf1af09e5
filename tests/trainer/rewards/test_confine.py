"""What a confined process cannot do. Each line runs in one, through the fork server, as a program to be judged does."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.rewards.confine import _column
from trainer.rewards.forkserver import Limits, Outcome, close_fork_servers, fork_server

LIMITS = Limits(cpu_seconds=0.5, memory_bytes=1 << 29, output_bytes=1 << 16)


def run(code: str, limits: Limits = LIMITS) -> Outcome:
    return fork_server("trainer.rewards.sandbox").run({"code": code}, limits)


def told(expression: str) -> str:
    """What the expression comes to in there: its value, or the error's name."""
    outcome = run(
        f"import os, socket\ntry:\n    print({expression})\nexcept Exception as error:\n    print(type(error).__name__)"
    )
    assert outcome.ending is None, outcome
    return outcome.output.strip()


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_it_has_no_socket(family: str) -> None:
    assert told(f"socket.socket(socket.{family})") == "PermissionError"


def test_it_reaches_no_server_that_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert told(f"socket.create_connection({address!r}, timeout=1)") == "PermissionError"
        socket.create_connection(address, timeout=1).close()  # from here it is reached


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
def test_it_changes_no_file(expression: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    (tmp_path / "empty").mkdir()
    before = [(path.name, path.stat()) for path in sorted(tmp_path.iterdir())]
    assert told(expression.format(dir=tmp_path)) == "PermissionError"
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
def test_it_starts_no_process(expression: str) -> None:
    assert told(expression) in {"PermissionError", "ZeroDivisionError"}


def test_calls_that_a_filter_cannot_see_through_or_does_not_know_are_not_there() -> None:
    """clone3, whose flags lie in memory, and what kernels have added since this was written. ENOSYS is 38."""
    call = "print(libc.syscall(n, 0, 0), ctypes.get_errno())"
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in (435, 451, 462):\n    {call}"
    assert run(code).output == "-1 38\n" * 3


def test_it_signals_nobody() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        assert told(f"os.kill({other.pid}, 9)") == "PermissionError"
        assert told("os.kill(os.getppid(), 9)") == told("os.kill(-1, 9)") == "PermissionError"
        assert told(f"__import__('resource').prlimit({other.pid}, 0, (1, 1))") == "PermissionError"
        assert other.poll() is None
        other.kill()


def test_it_may_have_threads() -> None:
    assert run("import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()").output == "7\n"


def test_it_sees_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "much")
    close_fork_servers()  # the next one starts with it
    assert told("'SECRET_KEY' in os.environ") == "False"


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("while True: pass", "died of SIGPROF"),
        ("import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')", "died of SIGPROF"),
        ("import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass", "died of SIGKILL"),
        ("import time\ntime.sleep(60)", "timed out after 2 s"),
        ("x = bytearray(1 << 40)", "ended with exit code 1"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "ended with exit code 1"),
        ("import ctypes\nctypes.string_at(0)", "died of SIGSEGV"),
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("raise ValueError", "ended with exit code 1"),
        ("print('x' * (1 << 20))", "ended with exit code 1"),
    ],
)
def test_it_ends_at_its_limits_alone(code: str, ending: str) -> None:
    assert run(code).ending == ending
    assert run("print(7)").output == "7\n"


def test_it_runs_the_same_each_time() -> None:
    code = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'}, hash('a'))"
    assert run(code).output == run(code).output


def test_a_machine_that_cannot_confine_is_told() -> None:
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
    os.kill(fork_server("trainer.rewards.sandbox").pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="server of confined processes is gone"):
        run("print(7)")
    assert run("print(7)").output == "7\n"
