"""Fork server on a kernel without Landlock (5.13) and without thread requests (5.5)."""

from trainer.rewards.sandbox import forkserver, sandbox, seccomp


def main(fd: int) -> None:
    forget_new_calls()
    sandbox.main(fd)


def forget_new_calls() -> None:
    for module in (seccomp, sandbox):
        module.landlock_version = lambda: 0
    forkserver.thread_requests = lambda: None
