"""Fork servers as they are on a kernel that has neither Landlock (5.13) nor requests for threads (5.5)."""

from trainer.rewards import confine, forkserver, sandbox


def main(fd: int) -> None:
    forget_new_calls()
    sandbox.main(fd)


def forget_new_calls() -> None:
    for module in (confine, sandbox):
        module.landlock_version = lambda: 0
    forkserver.thread_requests = lambda: None
