"""An HTTP server at a real socket whose replies a test defines."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any, float]
"""HTTP status; body, as it is sent if it is bytes, in drops if it is a list of them, else as JSON; seconds until then."""


class Server(ThreadingHTTPServer):
    """asked: path, Authorization and body of each request. at_once: requests that it works on."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def reply_to(self, n: int, body: Any) -> Reply:
        """Reply to the n-th request, counted from 1."""
        raise AssertionError("a test says")

    @contextmanager
    def listening(self) -> Iterator[None]:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        yield
        self.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, self.headers["Authorization"], body))
            status, reply, seconds = self.server.reply_to(len(self.server.asked), body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        time.sleep(seconds)
        with self.server.lock:
            self.server.at_once -= 1
        drops = reply if isinstance(reply, list) and all(isinstance(drop, bytes) for drop in reply) else []
        data = b"" if drops else reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        with suppress(ConnectionError):  # the client has disconnected
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(data) + sum(map(len, drops))))
            self.end_headers()
            self.wfile.write(data)
            for drop in drops:
                time.sleep(0.05)
                self.wfile.write(drop)

    def log_message(self, format: str, *args: Any) -> None:
        pass
