from collections.abc import Iterator

import pytest

from trainer.rewards.sandbox.forkserver import close_fork_servers


@pytest.fixture(scope="module", autouse=True)
def no_fork_server_left_behind(no_process_left_behind: None) -> Iterator[None]:
    """Scorers called in this process keep their fork servers until it exits; close them."""
    yield
    close_fork_servers()
