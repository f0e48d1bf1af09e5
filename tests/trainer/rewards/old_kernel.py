"""Fork server on a kernel without Landlock (5.13) and without thread requests (5.5)."""

from trainer.rewards import confine, forkserver, sandbox


def main(fd: int) -> None:
    forget_new_calls()
    sandbox.main(fd)


def forget_new_calls() -> None:
    for module in (confine, sandbox):
        module.landlock_version = lambda: 0
    forkserver.thread_requests = lambda: None
