"""JSON by HTTP, for rewards that another process knows: a judge's, a reward server's."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from configs.addresses import is_loopback
from configs.secret_names import hidden

Answer = TypeVar("Answer")

_MAY_PASS = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP: a later request may fare better
_MAX_REPLY = 1 << 22  # bytes


class Passing(Exception):
    """A failure that a later request may not meet. late: a server took the request and did not reply in time."""

    def __init__(self, said: str, *, late: bool = False) -> None:
        super().__init__(said)
        self.late = late


class Refused(Exception):
    """A failure that the same request would meet again, or that has been met too often. late: as of Passing."""

    def __init__(self, said: str, *, late: bool = False) -> None:
        super().__init__(said)
        self.late = late


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))  # no proxy knows this machine's loopback


def post(url: str, body: bytes, *, token: str | None, timeout: float, timeout_key: str) -> Any:
    """What the server replies to the JSON ``body``, whole after ``timeout`` seconds. token: sent as «Authorization: Bearer»,
    to this host alone. timeout_key: where the user sets the timeout. Raises Passing and Refused, one line without secrets.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    deadline = time.monotonic() + timeout
    opener = _DIRECT if is_loopback(urlsplit(url).hostname or "") else _OPENER
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=timeout) as response:
            return json.loads(_read(response, deadline, timeout_key))
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(200).decode(errors="replace").split())
        kind = Passing if error.code in _MAY_PASS else Refused
        raise kind(hidden(f"HTTP {error.code} from {url}: {said}")) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, a time-out, a broken reply
        late = isinstance(error, TimeoutError)  # one of the connection is a URLError
        raise Passing(hidden(f"{url}: {type(error).__name__}: {error}"), late=late) from error


def nobody_there(url: str, timeout: float) -> str | None:
    """Why nothing takes a connection at ``url``. None if something does, or if a proxy is between, which alone could tell."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    by_proxy = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    if by_proxy and not is_loopback(host):
        return None
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        return f"{url}: {error}"
    return None


def patiently(ask: Callable[[], Answer], *, retries: int, backoff: float) -> Answer:
    """What ``ask`` gives; after Passing it is called again, ``retries`` times, the first after ``backoff`` seconds, each later
    one after twice as many. Raises Refused.
    """
    for attempt in range(retries + 1):
        try:
            return ask()
        except Passing as error:
            if attempt == retries:
                raise Refused(f"in {attempt + 1} requests; the last: {error}", late=error.late) from error
            time.sleep(backoff * 2**attempt)
    raise AssertionError("unreachable")


def _read(response: http.client.HTTPResponse, deadline: float, timeout_key: str) -> bytes:
    """The whole body. A server that lets it drip is late too."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the reply was not whole in {timeout_key}")
        if size > _MAX_REPLY:
            raise Refused(f"the reply is longer than {_MAX_REPLY} bytes")
    return b"".join(parts)
