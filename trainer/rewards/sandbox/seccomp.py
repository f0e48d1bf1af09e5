"""Irrevocably sandbox the calling process before it runs model-generated code. Linux on x86_64 and aarch64.

Problem: rewards execute programs that a model wrote, on a machine with the user's files, network and processes, often inside a
container where neither namespaces nor another sandbox may be created. Idea: the process gives up its own rights with what every
unprivileged user may use. A seccomp filter is an allow-list of the system calls that computing, reading files and writing to open
descriptors need, checked by number and arguments; every other call fails. Landlock (Linux 5.13) limits reading to the
interpreter's own files; on older kernels no file can be opened at all. Resource limits bound memory, CPU time and output. Cost:
a few system calls per process at its start, and some instructions of the filter in each later one.

A seccomp filter sees numbers and argument registers, never memory: calls whose flags lie in a struct (clone3, openat2) can only
be refused as a whole. A filter cannot be removed, and children inherit it.
"""

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
Numbers = tuple[int | None, int | None]
"""A system call on x86_64 (asm/unistd_64.h) and aarch64 (asm-generic/unistd.h); None: it does not exist there."""

_ALLOWED: dict[str, Numbers] = {
    # I/O on descriptors that the process already has
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "lseek": (8, 62),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    # names and metadata of files; Landlock does not restrict stat
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    # memory and threads (creating a thread is a rule below)
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "membarrier": (324, 283),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    # clocks, random numbers, identity of the process
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getpriority": (140, 141),
    "getcpu": (309, 168),
    "umask": (95, 166),
    # its own signals (no kill, tkill or sigqueue: they reach other processes) and exit
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}


class Condition(NamedTuple):
    """Test of a 32-bit half of an argument: equal to ``value``, or with ``none_of`` no common bits.

    BPF compares 32 bits at a time; arguments are 64 bits, little-endian, lower half first.
    """

    argument: int
    value: int
    none_of: bool = False
    upper: bool = False


class Rule(NamedTuple):
    """Allow a system call if all conditions hold. Arguments that the kernel truncates to int need no test of the upper half."""

    numbers: Numbers
    conditions: tuple[Condition, ...]


# O_ASYNC would let the kernel send signals to another process; see F_SETFL below.
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_ASYNC
_OPENING = [
    Rule((2, None), (Condition(1, _WRITING, none_of=True),)),  # open
    Rule((257, 56), (Condition(2, _WRITING, none_of=True),)),  # openat
]
# Exactly the flags with which a C library starts a thread, so that clone cannot create a process.
# CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM | SETTLS | PARENT_SETTID | CHILD_CLEARTID: glibc; and CLONE_DETACHED: musl
_THREADS = [Rule((56, 220), (Condition(0, flags),)) for flags in (0x3D0F00, 0x7D0F00)]  # clone
_DESCRIPTOR_COMMANDS = (fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC)
# TCGETS, TCGETS2 (isatty), TIOCGWINSZ, FIONBIO, FIONREAD, FIOCLEX, FIONCLEX
_DEVICE_COMMANDS = (0x5401, 0x802C542A, 0x5413, 0x5421, 0x541B, 0x5451, 0x5450)
# SOCK_STREAM with SOCK_NONBLOCK and SOCK_CLOEXEC. No datagram sockets: each message could name another address.
_STREAMS = (0x1, 0x801, 0x80001, 0x80801)
_RULES = [
    # fcntl, without the commands for owners, signals, leases, locks and pipe sizes, which have effects on other processes
    *(Rule((72, 25), (Condition(1, command),)) for command in _DESCRIPTOR_COMMANDS),
    Rule((72, 25), (Condition(1, fcntl.F_SETFL), Condition(2, os.O_ASYNC, none_of=True))),
    *(Rule((16, 29), (Condition(1, command),)) for command in _DEVICE_COMMANDS),  # ioctl
    *(Rule((53, 199), (Condition(0, 1), Condition(1, kind))) for kind in _STREAMS),  # socketpair, AF_UNIX: for asyncio
    Rule((44, 206), (Condition(4, 0), Condition(4, 0, upper=True))),  # sendto with a null address
    Rule((302, 261), (Condition(0, 0), Condition(2, 0), Condition(2, 0, upper=True))),  # prlimit64: read own limits
    Rule((302, 261), (Condition(0, 0), Condition(1, resource.RLIMIT_STACK))),  # prlimit64: set own stack limit
    Rule((160, 164), (Condition(0, resource.RLIMIT_STACK),)),  # setrlimit
    # setitimer for ITIMER_REAL only: ITIMER_PROF enforces the limit of CPU time and must not be rearmed.
    Rule((38, 103), (Condition(0, 0),)),
    *(Rule((157, 167), (Condition(0, option),)) for option in (15, 16)),  # prctl, PR_SET_NAME and PR_GET_NAME
]
# Calls from this number on are recent: libraries probe for them and fall back to older ones on ENOSYS (clone3 to clone, openat2
# to openat). With EPERM they would give up.
_FIRST_OPTIONAL = 424
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000  # linux/seccomp.h
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION = 0x20080522
_SECCOMP: Numbers = (317, 277)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock, the same numbers on all architectures
# linux/landlock.h, by ABI version. A ruleset must declare every right it knows: an undeclared right is not restricted, and an
# unknown one fails with EINVAL.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READ_FILE, _READ_DIR = 4, 8
_SHARED_FILES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_SHARED_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """Seccomp filter and Landlock ruleset, created once by the parent of the processes that ``enter`` it."""

    def __init__(self, *, threads: bool, opens: bool) -> None:
        """threads: confined processes may start threads, see ``thread_requests``. opens: they may open files even without
        Landlock. Raises OSError on an unsupported machine.
        """
        column = _column(platform.machine())
        self._ruleset = _reading_rules() if landlock_version() else None
        opens = opens or self._ruleset is not None
        rules = [*_RULES, *(_OPENING if opens else []), *(_THREADS if threads else [])]
        self._program = _program(column, rules)
        self._column = column
        self._parent = os.getpid()

    def enter(self, *, cpu_seconds: float, memory_bytes: int, output_bytes: int) -> None:
        """Confine this process, irrevocably.

        It is killed after ``cpu_seconds`` of CPU time, and when its parent dies. ``memory_bytes`` bounds its address space,
        ``output_bytes`` each file that it writes. Raises OSError if the system does not support this.
        """
        # The order matters: the filter comes last, since it refuses the system calls of the steps before it.
        for kind, limit in (
            # Second line of defence in whole seconds: the program may ignore SIGPROF, which the timer below sends.
            (resource.RLIMIT_CPU, int(cpu_seconds) + 1),
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, output_bytes),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (bound, bound))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        # Root in a container has capabilities that bypass permissions; drop all of them.
        _check("capset", _libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)))
        _check("prctl(PR_SET_PDEATHSIG)", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        # PR_SET_PDEATHSIG misses a parent that died before the call.
        if os.getppid() != self._parent:
            raise ProcessLookupError(errno.ESRCH, "the fork server has exited")
        _no_new_privileges()
        if self._ruleset is not None:
            _check("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, self._ruleset, 0))
        _install(self._program, self._column, 0)


def thread_requests() -> int | None:
    """Descriptor that receives a request for every thread that this process and its children start.

    The clone call blocks until ``answer_thread_request``. None if unsupported: before Linux 5.5, or if another process already
    listens to this one.
    """
    # There is no per-process limit of threads: RLIMIT_NPROC counts all processes of the user. seccomp's user notification lets
    # the server count threads of a job and grant or refuse each clone.
    column = _column(platform.machine())
    _no_new_privileges()
    steps = [_step(_LOAD, 0), *(step for rule in _THREADS for step in _rule(rule, column, _NOTIFY)), _step(_RETURN, _ALLOW)]
    try:
        requests = _install(b"".join(steps), column, _NEW_LISTENER)
    except OSError:
        return None
    # Probe with a request id that does not exist: ENOENT means that the flag in the answer was accepted.
    try:
        _answer_request(requests, bytes(8), granted=True)
    except FileNotFoundError:
        return requests
    except OSError:  # Linux 5.0 to 5.4 have no SECCOMP_USER_NOTIF_FLAG_CONTINUE
        pass
    os.close(requests)
    return None


def answer_thread_request(requests: int, child: int, most: int) -> None:
    """Receive a request of ``child``; grant it while the process has fewer than ``most`` threads, else fail it with EAGAIN."""
    request = bytearray(80)  # struct seccomp_notif: u64 id, u32 pid, u32 flags, seccomp_data
    with suppress(OSError):  # the requesting thread may end at any time
        fcntl.ioctl(requests, 0xC0502100, request)  # SECCOMP_IOCTL_NOTIF_RECV
        try:
            granted = len(os.listdir(f"/proc/{child}/task")) < most
        except OSError:  # threads cannot be counted, for example without /proc: refuse
            granted = False
        _answer_request(requests, bytes(request[:8]), granted=granted)


def _answer_request(requests: int, request: bytes, *, granted: bool) -> None:
    answer = request + struct.pack("qiI", 0, 0 if granted else -11, granted)  # EAGAIN; SECCOMP_USER_NOTIF_FLAG_CONTINUE
    fcntl.ioctl(requests, 0xC0182101, answer)  # SECCOMP_IOCTL_NOTIF_SEND


def landlock_version() -> int:
    """Landlock ABI version of the kernel; 0 if Landlock is missing or blocked by a container."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def _reading_rules() -> int:
    """Descriptor of a Landlock ruleset that allows reading of the interpreter's files only."""
    version = landlock_version()
    # Network: bind and connect. Scopes: abstract Unix sockets and signals. The filter refuses both already.
    network, scopes = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", _FILE_RIGHTS[min(version, 5)], network, scopes)
    ruleset = _check("landlock_create_ruleset", _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for path in _readable():
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _check("landlock_add_rule", _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, file), 0))
        os.close(file)
    return ruleset


def _readable() -> set[str]:
    """Paths of modules and shared libraries, for late imports. Excludes data, home directories, /proc and /tmp."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    packages = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return packages | {f"{prefix}/{lib}" for prefix in prefixes for lib in ("lib", "lib64")} | {*_SHARED_FILES, *_SHARED_DEVICES}


def _no_new_privileges() -> None:
    # The kernel requires it of unprivileged users of seccomp and Landlock: a set-user-id program must not run under a filter.
    _check("prctl(PR_SET_NO_NEW_PRIVS)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _install(program: bytes, column: int, flags: int) -> int:
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    return _check("seccomp", _libc.syscall(_SECCOMP[column], _SET_MODE_FILTER, flags, described))


def _check(name: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed: model-generated code cannot be confined on this machine")
    return result


def _column(machine: str) -> int:
    if machine not in _AUDIT_ARCH:
        raise OSError(_ENOSYS, f"model-generated code cannot be confined on {machine}, only on {' and '.join(_AUDIT_ARCH)}")
    return list(_AUDIT_ARCH).index(machine)


def _program(column: int, rules: list[Rule]) -> bytes:
    """Assemble the filter in classic BPF. Its input is struct seccomp_data: nr, arch, instruction pointer, six arguments."""
    # The architecture first: the same number means another call under another ABI (i386 on x86_64), so a foreign ABI is killed.
    # x32 calls have bit 30 set in their number and match nothing. Then the plain allow-list, then rules with arguments.
    steps = [_step(_LOAD, 4), _step(_EQUAL, list(_AUDIT_ARCH.values())[column], 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    for rule in rules:
        steps += _rule(rule, column, _ALLOW)
    steps += [_step(_AT_LEAST, _FIRST_OPTIONAL, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS), _step(_RETURN, _ERRNO | _EPERM)]
    return b"".join(steps)


def _rule(rule: Rule, column: int, action: int) -> list[bytes]:
    """Instructions that return ``action`` if number and conditions match, else fall through with the call's number loaded."""
    number = rule.numbers[column]
    if number is None:
        return []
    length = 2 * len(rule.conditions) + 1
    steps = [_step(_EQUAL, number, 0, length + 1)]
    for i, condition in enumerate(rule.conditions):
        # A failed condition jumps to the last instruction, which restores the number for the next rule.
        skip = length - 2 * i - 2
        steps.append(_step(_LOAD, 16 + 8 * condition.argument + 4 * condition.upper))
        steps.append(_step(_ANY_BIT, condition.value, skip, 0) if condition.none_of else _step(_EQUAL, condition.value, 0, skip))
    return [*steps, _step(_RETURN, action), _step(_LOAD, 0)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction, struct sock_filter; jumps count the instructions to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)
