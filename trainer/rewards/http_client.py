"""JSON over HTTP for rewards computed by other processes: LLM judges and reward servers."""

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

from configs.base.addresses import LONGEST_PAUSE, is_loopback
from configs.base.secrets import hidden

Reply = TypeVar("Reply")

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP status codes for which a retry may succeed
EXHAUSTED = "requests; the last: "
"""In the error of a request to a server that has failed transiently in all attempts."""
_MAX_REPLY = 1 << 22  # bytes


class TransientError(Exception):
    """Transient failure: a retry may succeed. late: a server accepted the request and did not reply in time."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class RequestRefused(Exception):
    """Permanent failure, or too many transient ones. late: see TransientError."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: it would send the token to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
# For loopback addresses, which mean another machine to a proxy.
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def post(url: str, body: bytes, *, token: str | None, timeout: float, timeout_key: str) -> Any:
    """POST the JSON ``body`` and return the decoded reply, which must be complete within ``timeout`` seconds.

    token: sent as «Authorization: Bearer», to this host only. timeout_key: configuration key of the timeout, for messages.
    Raises TransientError and Refused, one line without secrets.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    deadline = time.monotonic() + timeout
    opener = _DIRECT if is_loopback(urlsplit(url).hostname or "") else _OPENER
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=timeout) as response:
            return json.loads(_read(response, deadline, timeout_key))
    except urllib.error.HTTPError as error:
        kind = TransientError if error.code in _TRANSIENT else RequestRefused
        raise kind(hidden(f"HTTP {error.code} from {url}: {_reason(error)}")) from error
    # No connection, a timeout, an invalid reply.
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        # Only a timeout of the reply counts as late; one of the connection is a URLError and says nothing about the response.
        late = isinstance(error, TimeoutError)
        raise TransientError(hidden(f"{url}: {type(error).__name__}: {error}"), late=late) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """Beginning of the body of an error; a body that is cut off or does not come is no error of its own."""
    try:
        text = error.read(200)
    except (OSError, http.client.HTTPException) as cut:
        return f"{type(cut).__name__} while its body was read"
    return " ".join(text.decode(errors="replace").split())


def connection_problem(url: str, timeout: float) -> str | None:
    """Why no connection to ``url`` can be opened; None if one can, or if requests go through a proxy, which hides the server."""
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


def with_retries(request: Callable[[], Reply], *, retries: int, backoff: float) -> Reply:
    """Call ``request`` and retry after TransientError, up to ``retries`` times with exponential backoff.

    backoff: seconds before the first retry, doubled for each later one up to LONGEST_PAUSE. Raises Refused.
    """
    for attempt in range(retries + 1):
        try:
            return request()
        except TransientError as error:
            if attempt == retries:
                raise RequestRefused(f"after {attempt + 1} {EXHAUSTED}{error}", late=error.late) from error
            time.sleep(min(LONGEST_PAUSE, backoff * 2**attempt))
    raise AssertionError("unreachable")


def _read(response: http.client.HTTPResponse, deadline: float, timeout_key: str) -> bytes:
    """Read the whole body."""
    # The socket's timeout is per read: a server that sends a byte now and then would never exceed it.
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the reply was not complete within {timeout_key}")
        if size > _MAX_REPLY:
            raise RequestRefused(f"the reply is longer than {_MAX_REPLY} bytes")
    return b"".join(parts)
