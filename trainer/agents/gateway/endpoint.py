"""Endpoint of an agent process: programs call the policy here, with the SDK of OpenAI or Anthropic, as they call any server.

It listens on the loopback interface. The API key of a request names the session that it belongs to, so that unmodified clients,
whatever they send, reach their own session and no other.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from trainer.protocols import anthropic_messages, openai_chat, openai_responses
from trainer.protocols.common import BadRequest, ChatCompletion, ChatRequest, Delta, Head, decode_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import Request, Response

PROTOCOLS = {"/chat/completions": openai_chat, "/responses": openai_responses, "/messages": anthropic_messages}
MOST_BYTES = 64 << 20
"""Of a request: a conversation of the longest context with its tools."""

Answer = Callable[[ChatRequest], Awaitable[tuple[str, Sequence[ChatCompletion]]]]
"""Completions of a request, with an id for the reply. Raises BadRequest, or SessionClosed."""


class SessionClosed(Exception):
    """The session takes no calls any more. The text is the reason, one line."""


class Endpoint:
    """HTTP endpoint; ``serving`` opens it, ``session`` gives a key to what answers its calls. url: without a path.

    OpenAI's clients append paths to /v1, Anthropic's append /v1 too: all paths are served with and without it, so that one base
    URL is right for both.
    """

    def __init__(self) -> None:
        self.url = ""
        self._sessions: dict[str, Answer] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve until the block ends."""
        import uvicorn
        from fastapi import FastAPI

        def serve(protocol: ModuleType) -> Callable[[Request], Awaitable[Response]]:
            async def handle(request: Request) -> Response:
                return await self._handle(request, protocol)

            return handle

        app = FastAPI(openapi_url=None)
        for path, protocol in PROTOCOLS.items():
            for prefix in ("", "/v1"):
                # Without FastAPI's conversion of bodies, which takes three times as long as the rest.
                app.add_route(prefix + path, serve(protocol), methods=["POST"])
        place = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{place.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[place]))
        try:
            yield
        finally:
            server.should_exit = True
            await serving

    @contextmanager
    def session(self, answer: Answer) -> Iterator[str]:
        """The key of a session, as long as the block runs; calls that are unanswered at its end get an error."""
        key = secrets.token_urlsafe(24)
        running = set[asyncio.Task[tuple[str, Sequence[ChatCompletion]]]]()

        async def tracked(request: ChatRequest) -> tuple[str, Sequence[ChatCompletion]]:
            task = asyncio.ensure_future(answer(request))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.wait({task})
            if task.cancelled():
                raise SessionClosed("the session has ended")
            return task.result()

        self._sessions[key] = tracked
        try:
            yield key
        finally:
            del self._sessions[key]
            for task in running:
                task.cancel()

    async def _handle(self, request: Request, protocol: ModuleType) -> Response:
        from fastapi.responses import JSONResponse, Response

        try:
            answer = self._sessions.get(_key(request))
            if answer is None:
                return JSONResponse(protocol.error(401, "the API key is that of no session that runs"), 401)
            parsed = protocol.parse(decode_body(await _body(request)))
            name, completions = await answer(parsed)
        except BadRequest as error:
            return JSONResponse(protocol.error(400, str(error), error.param), 400)
        except SessionClosed as error:
            # Not 503: clients would repeat the call, with waits in between.
            return JSONResponse(protocol.error(409, str(error)), 409, headers={"x-should-retry": "false"})
        head = Head(name, int(time.time()), parsed.model)
        if not parsed.stream:
            return JSONResponse(protocol.reply(parsed, completions, head))
        return Response("".join(_events(protocol, parsed, completions, head)), media_type="text/event-stream")


def _events(protocol: ModuleType, request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Iterator[str]:
    """Events of a stream. A turn is complete before its session gets it, so each response is one delta."""
    events = protocol.events(request, head)
    yield events.start(completions[0].prompt_token_ids)
    for index, one in enumerate(completions):
        yield events.delta(Delta(index, one.text, one.thinking, one.calls, one.token_ids, one.log_probs, one.tokens))
        yield events.finish(index, one)
    yield events.end()


def _key(request: Request) -> str:
    """Anthropic's clients send x-api-key, all others a bearer token."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BadRequest(f"the request is larger than {MOST_BYTES >> 20} MiB")
    return bytes(body)
