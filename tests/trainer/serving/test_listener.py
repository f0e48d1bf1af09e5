"""The socket of a server."""

import socket

import pytest

from configs.compose import compose
from configs.schema.serve_reward import ServeRewardConfig
from trainer.serving.listener import bound


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = compose("serve_reward", ServeRewardConfig, ["server.host=127.0.0.1", f"server.port={port}"]).server
        with (
            pytest.raises(ValueError, match=r"Address already in use; take another port, or server\.port=0 for any$"),
            bound(server),
        ):
            pass
