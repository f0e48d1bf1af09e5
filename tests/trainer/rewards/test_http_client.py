import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer.rewards.server import Reply, Server
from trainer.rewards import http_client
from trainer.rewards.http_client import RequestRefused, TransientError, connection_problem, post, with_retries


class Echo(Server):
    def reply_to(self, n: int, body: object) -> Reply:
        return 200, body, 0.0


def test_loopback_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would receive the token, and resolve this name to another machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxied = urllib.request.build_opener(http_client._NoRedirect)  # the module's own read the environment at import
    monkeypatch.setattr(http_client, "_OPENER", proxied)
    with Echo() as server, server.listening():
        url = f"http://127.0.0.1:{server.server_port}/x"
        assert post(url, b"[1]", token=None, timeout=5.0, timeout_key="t") == [1]
        assert connection_problem(url, 5.0) is None
    with pytest.raises(TransientError, match="Connection refused"):  # the proxy's
        post("http://rewards.invalid/x", b"[1]", token=None, timeout=5.0, timeout_key="t")
    assert connection_problem("http://rewards.invalid/x", 5.0) is None, "only the proxy can resolve it"


def test_connection_problem_reports_unreachable_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1:1/x: [Errno" in (connection_problem("http://127.0.0.1:1/x", 1.0) or "")


def test_error_messages_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    class LeakyServer(Server):
        def reply_to(self, n: int, body: object) -> Reply:
            return 403, b"not with\nlong-secret-1", 0.0

    monkeypatch.setenv("SOME_TOKEN", "long-secret-1")
    with LeakyServer() as server, server.listening(), pytest.raises(RequestRefused) as error:
        post(f"http://127.0.0.1:{server.server_port}/x", b"[1]", token="long-secret-1", timeout=5.0, timeout_key="t")
    assert str(error.value).endswith("/x: not with ***") and "\n" not in str(error.value)
    assert server.asked[0][1] == "Bearer long-secret-1"


@pytest.mark.parametrize(("status", "kind"), [(503, TransientError), (403, RequestRefused)])
def test_an_error_whose_body_does_not_come_is_that_error(status: int, kind: type[Exception]) -> None:
    """As of a proxy that replies before it has read the request."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                asked = b""
                while not asked.endswith(b"[1]"):
                    asked += connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 {status} x\r\nContent-Length: 500\r\n\r\nbusy".encode())
                connection.recv(1)  # until the client gives up

        served = pool.submit(reply)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        with pytest.raises(kind, match=rf"HTTP {status} from {url}: TimeoutError while its body was read"):
            post(url, b"[1]", token=None, timeout=0.3, timeout_key="t")
        served.result()


def test_pauses_double(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("trainer.rewards.http_client.time.sleep", slept.append)

    def never() -> Path:
        raise TransientError("busy")

    with pytest.raises(RequestRefused, match="after 4 requests; the last: busy"):
        with_retries(never, retries=3, backoff=0.5)
    assert slept == [0.5, 1.0, 2.0]
    slept.clear()
    with pytest.raises(RequestRefused):
        with_retries(never, retries=40, backoff=20.0)
    assert slept == [20.0, 40.0, *[60.0] * 38]
