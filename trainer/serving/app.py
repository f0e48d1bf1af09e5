"""What is spoken over HTTP: who may ask, how much, and what comes back. See rewards/remote/openrlhf_protocol.py."""

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
from trainer.rewards.scoring import Answer
from trainer.serving.request_queue import Closed, Desk

_SLOWEST_REQUEST = 60.0  # seconds until it must be here whole


class Unfit(Exception):
    """The request is answered with a status other than 200, and a line that says why."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


def reward_app(
    desk: Desk, *, token: str | None, most_bytes: int, check: Callable[[Sequence[Answer]], None], health: Callable[[], Any]
) -> FastAPI:
    """token: requests for rewards must bear it; None: none. check: raises ValueError for answers that cannot be scored. health:
    what GET /health tells everybody.
    """
    app = FastAPI(openapi_url=None)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        """Scores, in OpenRLHF's format."""
        try:
            check_sender(request, token)
            answers = openrlhf_protocol.from_request(json.loads(await body_of(request, most_bytes)))
            check(answers)
            return JSONResponse(openrlhf_protocol.to_reply(await desk.scores(answers)))
        except ValueError as error:  # no JSON, not this format, no such data source
            return refusal(422, str(error))
        except Unfit as error:
            return refusal(error.status, str(error))
        except Closed:
            return refusal(503, "the server is stopping")

    @app.get("/health")
    async def get_health() -> JSONResponse:
        return JSONResponse({"status": "ok"} | health())

    return app


def refusal(status: int, said: str) -> JSONResponse:
    return JSONResponse({"detail": hidden(" ".join(said.split()))}, status)


def check_sender(request: Request, token: str | None) -> None:
    """Before anything of the body is read. Raises Unfit."""
    if token is not None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise Unfit(401, "no token, or the wrong one: the request must bear «Authorization: Bearer TOKEN»")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser of this machine may send other kinds unasked
        raise Unfit(415, f"the request must be application/json, not {kind or 'nothing'}")


async def body_of(request: Request, most_bytes: int) -> bytes:
    """The whole body. Raises Unfit for one that is too large or too late."""
    bound = f"server.max_request_mb={most_bytes / (1 << 20):g}"
    too_large = Unfit(413, f"the request is larger than {bound}; send fewer answers at once")
    if int(request.headers.get("content-length", 0)) > most_bytes:
        raise too_large
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(_SLOWEST_REQUEST):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Unfit(400, "the request has no end")  # nobody is there to read this
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > most_bytes:
                    raise too_large
    except TimeoutError as error:
        raise Unfit(408, f"the request was not whole after {_SLOWEST_REQUEST:g} s") from error
    return b"".join(parts)
