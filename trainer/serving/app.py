"""HTTP interface of the reward server. Format: rewards/remote/openrlhf_protocol.py."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from configs.base.secrets import hidden
from trainer.protocols.common import check_levels, decode_body
from trainer.rewards.remote import openrlhf_protocol
from trainer.rewards.scoring import Response, Score
from trainer.serving.request_checks import RequestError, body_of, check_sender, unless_disconnected
from trainer.serving.request_queue import ServerStopping

Scores = Callable[[Sequence[Response]], Coroutine[Any, Any, list[Score]]]
"""Of the responses of a request, in order. Raises ServerStopping."""


def reward_app(
    scores: Scores,
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
            body = decode_body(await body_of(request, most_bytes))
            check_levels(body, "the body")
            answers = openrlhf_protocol.from_request(body)
            check(answers)
            return JSONResponse(openrlhf_protocol.to_reply(await unless_disconnected(request, scores(answers))))
        except ValueError as error:  # no JSON, not this format, no such data source
            return refusal(422, str(error))
        except RequestError as error:
            return refusal(error.status, str(error))
        except ServerStopping:
            return refusal(503, "the server is stopping")

    @app.get("/health")
    async def get_health() -> JSONResponse:
        return JSONResponse({"status": "ok"} | health())

    return app


def refusal(status: int, message: str) -> JSONResponse:
    """Reply with a one-line error; secrets in it are hidden."""
    return JSONResponse({"detail": hidden(" ".join(message.split()))}, status)
