"""Takes from the calling process, for good, what code of a model has no business with. Linux on x86_64 and aarch64.

After ``confine`` a process can compute, read files and write to the descriptors that it has: nothing else. It reaches no network,
changes no file, starts no process, signals none, and ends at its limits of CPU time, memory and output. This is a seccomp filter,
which every user may set, also in containers that allow no namespaces of one's own.
"""

import ctypes
import os
import platform
import resource
import signal
import struct

# Where a number says what a call is: linux's asm/unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64); None: not there.
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # other processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # files
    "creat": (85, None),
    "truncate": (76, 45),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "openat2": (437, 437),
    # the kernel itself
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "userfaultfd": (323, 282),
}
_OPEN: dict[str, tuple[tuple[int | None, int | None], int]] = {
    "open": ((2, None), 1),
    "openat": ((257, 56), 2),
}  # and their flags
_CLONE, _CLONE3 = (56, 220), 435
_FIRST_UNKNOWN = 450  # what newer kernels add, and x32
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_CAPABILITY_VERSION = 0x20080522


def confine(*, cpu_seconds: float, memory_bytes: int, output_bytes: int) -> None:
    """From here on the process only computes. It ends by a signal at ``cpu_seconds``; ``memory_bytes`` bounds its address space,
    ``output_bytes`` each file that it writes through a descriptor it has. Raises OSError where the system cannot do that.
    """
    program = _program(platform.machine())
    for kind, limit in (
        (resource.RLIMIT_CPU, int(cpu_seconds) + 1),  # where the timer below has been switched off
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
    libc = ctypes.CDLL(None, use_errno=True)
    header, no_capabilities = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    code = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    for name, result in (
        ("capset", libc.capset(header, no_capabilities)),
        ("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ("prctl(PR_SET_SECCOMP)", libc.prctl(_PR_SET_SECCOMP, _FILTER, described, 0, 0)),
    ):
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{name} failed: code of a model cannot be confined here")


def _program(machine: str) -> bytes:
    """The filter, in the kernel's classic BPF: it sees struct seccomp_data, that is nr, arch, an address, six arguments."""
    if machine not in _AUDIT_ARCH:
        raise OSError(_ENOSYS, f"code of a model cannot be confined on {machine}, only on {' and '.join(_AUDIT_ARCH)}")
    column = list(_AUDIT_ARCH).index(machine)
    steps = [
        *(_step(_LOAD, 4), _step(_EQUAL, _AUDIT_ARCH[machine], 1, 0), _step(_RETURN, _KILL)),
        _step(_LOAD, 0),
        *_when(_AT_LEAST, _FIRST_UNKNOWN, _ENOSYS),
        *_when(_EQUAL, _CLONE3, _ENOSYS),  # its flags lie in memory; C libraries then take clone
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            steps += _when(_EQUAL, number, _EPERM)
    for numbers, position in _OPEN.values():
        if (number := numbers[column]) is not None:
            steps += _unless_bits(number, position, _WRITING, allowed_with=False)
    steps += _unless_bits(_CLONE[column], 0, _CLONE_THREAD, allowed_with=True)
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """struct sock_filter; the jumps count steps that are left out."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(test: int, value: int, error: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, _ERRNO | error)]


def _unless_bits(number: int, argument: int, bits: int, *, allowed_with: bool) -> list[bytes]:
    """The call is decided by whether its argument has any of the bits. They lie in the lower half, which comes first."""
    yes, no = (_ALLOW, _ERRNO | _EPERM) if allowed_with else (_ERRNO | _EPERM, _ALLOW)
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, 16 + 8 * argument),
        _step(_ANY_BIT, bits, 0, 1),
        _step(_RETURN, yes),
        _step(_RETURN, no),
    ]
