"""Checks of a request: token, content type and size before it is parsed, and whether its client still waits."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")
_SLOWEST_REQUEST = 60.0  # seconds in which a request body must arrive


class RequestError(Exception):
    """Refuse a request with an HTTP status and a one-line reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_sender(request: Request, token: str | None) -> None:
    """Check token and content type before the body is read. Raises RequestError."""
    check_token(request, token)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page in a browser on this machine may send other content types across origins without a preflight request.
    if kind != "application/json":
        raise RequestError(415, f"the request must be application/json, not {kind or 'nothing'}")


def check_token(request: Request, token: str | None) -> None:
    """Check the token of a request, ``Authorization: Bearer`` or, as Anthropic's clients send it, x-api-key."""
    if token is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    key = given if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    # compare_digest takes the same time for every token: response times reveal nothing about the right one.
    if not hmac.compare_digest(key.strip().encode(), token.encode()):
        raise RequestError(
            401, "no token, or the wrong one: the request must have «Authorization: Bearer TOKEN» or «x-api-key: TOKEN»"
        )


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Read the complete body. Raises RequestError if it is too large or does not arrive in time."""
    bound = f"server.max_request_mb={most_bytes / (1 << 20):g}"
    too_large = RequestError(413, f"the request is larger than {bound}; send less at once")
    if int(request.headers.get("content-length", 0)) > most_bytes:
        raise too_large
    # The header may be missing or wrong, so the bytes received are counted too.
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(_SLOWEST_REQUEST):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestError(400, "the request has no end")  # the client has gone; the reply is not delivered
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > most_bytes:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, f"the request was not whole after {_SLOWEST_REQUEST:g} s") from error
    return b"".join(parts)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled if the client goes. Raises RequestError then."""
    doing, going = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((doing, going), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise RequestError(400, "the client has gone")
        return await doing
    finally:
        doing.cancel()
        going.cancel()
