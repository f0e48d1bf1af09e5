"""HTTP interface of the reward server: authentication, size limits, replies. Format: rewards/remote/openrlhf_protocol.py."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from configs.base.secrets import hidden
from trainer.rewards.remote import openrlhf_protocol
from trainer.rewards.scoring import Response
from trainer.serving.request_queue import QueueClosed, RequestQueue

_SLOWEST_REQUEST = 60.0  # seconds in which a request body must arrive


class RequestError(Exception):
    """Refuse a request with an HTTP status and a one-line reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def reward_app(
    queue: RequestQueue,
    *,
    token: str | None,
    most_bytes: int,
    check: Callable[[Sequence[Response]], None],
    health: Callable[[], Any],
) -> FastAPI:
    """Build the application: POST /get_reward and GET /health.

    token: bearer token that reward requests must have; None: none required. most_bytes: maximum size of a body. check: raises
    ValueError for responses that cannot be scored. health: content of GET /health, which requires no token.
    """
    app = FastAPI(openapi_url=None)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        """Score a request in OpenRLHF's format."""
        try:
            check_sender(request, token)
            answers = openrlhf_protocol.from_request(json.loads(await body_of(request, most_bytes)))
            check(answers)
            return JSONResponse(openrlhf_protocol.to_reply(await queue.scores(answers)))
        except ValueError as error:  # no JSON, not this format, no such data source
            # Covers JSON syntax, format and unknown data sources.
            return refusal(422, str(error))
        except RequestError as error:
            return refusal(error.status, str(error))
        except QueueClosed:
            return refusal(503, "the server is stopping")

    @app.get("/health")
    async def get_health() -> JSONResponse:
        return JSONResponse({"status": "ok"} | health())

    return app


def refusal(status: int, message: str) -> JSONResponse:
    """Reply with a one-line error; secrets in it are hidden."""
    return JSONResponse({"detail": hidden(" ".join(message.split()))}, status)


def check_sender(request: Request, token: str | None) -> None:
    """Check token and content type before the body is read. Raises Unfit."""
    if token is not None:
        # compare_digest takes the same time for every token: response times reveal nothing about the right one.
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise RequestError(401, "no token, or the wrong one: the request must bear «Authorization: Bearer TOKEN»")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page in a browser on this machine may send other content types across origins without a preflight request.
    if kind != "application/json":
        raise RequestError(415, f"the request must be application/json, not {kind or 'nothing'}")


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Read the complete body. Raises Unfit if it is too large or does not arrive in time."""
    bound = f"server.max_request_mb={most_bytes / (1 << 20):g}"
    too_large = RequestError(413, f"the request is larger than {bound}; send fewer answers at once")
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
