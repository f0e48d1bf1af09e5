"""A socket, and uvicorn on it in a second thread."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any

from configs.schema.serve_reward import ListenerConfig
from workers.controller.stop import shielded

if TYPE_CHECKING:
    from fastapi import FastAPI

_DRAIN_SECONDS = 5.0  # seconds to deliver pending replies when the server stops


class Listener:
    """uvicorn in a second thread, where it does not install signal handlers."""

    def __init__(self, place: socket.socket, app: FastAPI, server: ListenerConfig) -> None:
        import uvicorn

        options = uvicorn.Config(
            app, log_level="warning", access_log=False, limit_concurrency=server.max_connections, lifespan="off", ws="none"
        )
        host, port = place.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._place = place
        self._server = uvicorn.Server(options)
        self._thread = Thread(target=self._server.run, args=([place],), daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        while self.is_alive() and not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *ended: Any) -> None:
        # Signals are held back here: pending replies are delivered before the process ends.
        with shielded():
            self._server.should_exit = True
            self._thread.join(_DRAIN_SECONDS)

    def is_alive(self) -> bool:
        return self._thread.is_alive()


@contextmanager
def bound(server: ListenerConfig) -> Iterator[socket.socket]:
    """A socket bound to server.host and server.port that does not listen yet. Raises ValueError if binding fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        other = "; take another port, or server.port=0 for any" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"server.host={server.host} server.port={server.port}: {error}{other}") from error
    with place:
        yield place


def check_installed() -> None:
    """Raises ValueError, with the pip command, if the extra «serve» is not installed."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: not installed here; run pip install 'tandem[serve]'")
