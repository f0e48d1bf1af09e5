from collections.abc import Iterator

import pytest

from trainer.rewards.forkserver import close_fork_servers


@pytest.fixture(scope="module", autouse=True)
def no_fork_server_left_behind(no_process_left_behind: None) -> Iterator[None]:
    """What a scorer called in this process has started stays for the next call, until the process ends."""
    yield
    close_fork_servers()
