"""HTTP interface of the model server: OpenAI's and Anthropic's protocols over one engine.

Bodies are read and written as JSON without models of pydantic, which would take three times as long (0.5 ms a request).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from configs.base.secrets import hidden
from trainer.agents.formats import Format, opens_thinking
from trainer.data.encoding import Refused, token_ids
from trainer.data.seam import Seams
from trainer.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from trainer.protocols.common import BadRequest, Body, ChatCompletion, ChatRequest, Delta, Events, Head, decode_body
from trainer.serving.model_engine import Generation, ModelEngine, TooManyRequests, Update
from trainer.serving.request_checks import RequestError, body_of, check_sender, check_token, unless_disconnected
from trainer.serving.request_queue import ServerStopping
from trainer.serving.response_reader import ResponseReader
from trainer.serving.turn_splitter import TurnSplitter
from workers.rollout.base import Sampling
from workers.seeding import seed_of

_STOPPING = "the server is stopping"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'"
)


class ClientProtocol(Protocol):
    """A module of trainer.protocols."""

    def parse(self, body: Body) -> ChatRequest: ...
    def reply(self, request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Body: ...
    def events(self, request: ChatRequest, head: Head) -> Events: ...
    def error(self, status: int, message: str, param: str | None = None) -> Body: ...


PROTOCOLS: dict[str, ClientProtocol] = {
    "/v1/chat/completions": openai_chat,
    "/v1/completions": openai_completions,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are read and written with.

    sampling: of requests that say nothing else. format_name, format: of calls. max_length: of prompt and response together.
    has_seeds: whether the engine samples by the seeds of requests.
    """

    name: str
    seams: Seams
    format_name: str
    format: Format
    sampling: Sampling
    max_length: int
    vocab_size: int
    has_seeds: bool

    def prompts(self, request: ChatRequest) -> list[tuple[tuple[int, ...], bool]]:
        """Token ids of each prompt, and whether it ends within a thinking block. Raises BadRequest."""
        if request.messages:
            text = self._rendered(request)
            prompts = [(tuple(self.seams.ids(text)), opens_thinking(text))]
        else:
            prompts = [(self._ids(prompt), False) for prompt in request.prompts]
        for ids, _ in prompts:
            if not ids:
                raise BadRequest("the prompt is empty", "prompt")
            if max(ids) >= self.vocab_size:
                raise BadRequest(f"prompt: token {max(ids)} is outside the vocabulary of {self.vocab_size}", "prompt")
            if len(ids) + 1 > self.max_length:
                # verifiers looks for these words, and ends the episode.
                room = f"the maximum model length is {self.max_length} tokens"
                raise BadRequest(f"{room}, and the prompt has {len(ids)} and needs room for one more", "messages")
        return prompts

    def _rendered(self, request: ChatRequest) -> str:
        if self.seams.tokenizer.chat_template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", "messages")
        try:
            return self.seams.render_calls(request.messages, request.tools, prompt=True)
        except Refused as error:
            raise BadRequest(" ".join(str(error).split()), "messages") from error

    def _ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        return tuple(token_ids(self.seams.tokenizer, [prompt], special=True)[0].tolist())

    def sampling_of(self, request: ChatRequest, prompt_length: int) -> Sampling:
        options = request.sampling
        given = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        room = self.max_length - prompt_length
        most = room if options.max_tokens is None else min(options.max_tokens, room)
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self.sampling, max_tokens=most, **changes)


def model_app(engine: ModelEngine, model: ServedModel, *, token: str, most_bytes: int, health: Callable[[], Any]) -> FastAPI:
    """Build the application. token: that requests must have. most_bytes: maximum size of a body. health: of GET /health."""
    app = FastAPI(openapi_url=None)
    started, numbers, run = int(time.time()), itertools.count(), secrets.token_hex(4)

    def other_model(name: str) -> str:
        return f"model {name!r:.80}: not here; this server has {model.name!r}"

    async def answer(request: Request) -> Response:
        """Reply to a request of any protocol."""
        protocol = PROTOCOLS[request.url.path]
        try:
            check_sender(request, token)
            wanted = protocol.parse(decode_body(await body_of(request, most_bytes)))
            if wanted.model != model.name:
                return refusal(protocol, 404, other_model(wanted.model), "model")
            running = RunningRequest(engine, model, wanted)
            head = Head(f"{run}-{next(numbers)}", int(time.time()), model.name)
            if wanted.stream:
                events = sent_events(protocol.events(wanted, head), running)
                return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            completions = await unless_disconnected(request, running.completions())
            return JSONResponse(protocol.reply(wanted, completions, head))
        except BadRequest as error:
            return refusal(protocol, 400, str(error), error.param)
        except RequestError as error:
            return refusal(protocol, error.status, str(error))
        except TooManyRequests:
            return refusal(protocol, 429, f"{engine.most} responses run or wait; try again later")
        except ServerStopping:
            return refusal(protocol, 503, _STOPPING)

    for path in PROTOCOLS:
        app.add_route(path, answer, methods=["POST"])

    entry = {"id": model.name, "object": "model", "created": started, "owned_by": "tandem", "max_model_len": model.max_length}

    @app.get("/v1/models")
    @app.get("/v1/models/{name:path}")
    async def models(request: Request, name: str | None = None) -> JSONResponse:
        try:
            check_token(request, token)
        except RequestError as error:
            return refusal(openai_chat, error.status, str(error))
        if name is None:
            return JSONResponse({"object": "list", "data": [entry]})
        if name != model.name:
            return refusal(openai_chat, 404, other_model(name), "model")
        return JSONResponse(entry)

    @app.get("/health")
    async def get_health() -> JSONResponse:
        return JSONResponse({"status": "ok"} | health())

    @app.get("/")
    async def page() -> HTMLResponse:
        text = files("trainer.serving").joinpath("chat_page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"})

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        protocol = next((own for known, own in PROTOCOLS.items() if f"{path}/".startswith(f"{known}/")), openai_chat)
        return refusal(protocol, error.status_code, f"{request.method} {path}: {error.detail}")

    return app


def refusal(protocol: ClientProtocol, status: int, message: str, param: str | None = None) -> JSONResponse:
    """Reply with a one-line error; secrets in it are hidden."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    # A message may quote what was sent, in which half of a surrogate pair has no UTF-8.
    text = hidden(" ".join(message.split())).encode(errors="replace").decode()
    return JSONResponse(protocol.error(status, text, param and param.encode(errors="replace").decode()), status, headers)


class RunningRequest:
    """The responses to one request: n to each prompt. They begin with the object."""

    def __init__(self, engine: ModelEngine, model: ServedModel, request: ChatRequest) -> None:
        """Raises BadRequest, TooManyRequests, ServerStopping."""
        prompts, n = model.prompts(request), request.sampling.n
        if n * len(prompts) > engine.most:
            raise BadRequest(f"n: {n * len(prompts)} responses are more than this server's {engine.most}", "n")
        self.prompt_ids = prompts[0][0]
        self.readers: list[ResponseReader] = []
        self._engine = engine
        self._updates: asyncio.Queue[tuple[int, Update | None]] = asyncio.Queue()
        if request.sampling.seed is not None and not model.has_seeds:
            raise BadRequest("seed: this engine samples by its own; SGLang on CUDA needs enable_deterministic_inference", "seed")
        seed = secrets.randbits(62) if request.sampling.seed is None else request.sampling.seed
        reads_along = request.stream or bool(request.sampling.stop)
        groups: list[list[Generation]] = []
        for prompt, (ids, in_thinking) in enumerate(prompts):
            groups.append([])
            for sample in range(n):
                index = len(self.readers)
                self.readers.append(self._reader(model, request, index, ids, in_thinking))
                deliver = self._deliver_to(index)
                own_seed = seed_of(seed, "serve", prompt, sample)
                groups[-1].append(Generation(ids, model.sampling_of(request, len(ids)), own_seed, deliver, reads_along))
        self._generations = [generation for group in groups for generation in group]
        engine.submit(groups)

    def _deliver_to(self, index: int) -> Callable[[Update | None], None]:
        return lambda update: self._updates.put_nowait((index, update))

    def _reader(
        self, model: ServedModel, request: ChatRequest, index: int, ids: Sequence[int], in_thinking: bool
    ) -> ResponseReader:
        tokenizer = model.seams.tokenizer
        splitter = None
        if request.messages:
            name, format = (None, None) if request.tools is None else (model.format_name, model.format)
            splitter = TurnSplitter(name, format, request.tools or (), in_thinking=in_thinking)
        return ResponseReader(
            index,
            ids,
            tokenizer.backend_tokenizer,
            splitter,
            stop=request.sampling.stop,
            token_text=(lambda token: model.seams.text([token])) if request.logprobs else None,
            with_special=request.tools is not None,
            turn=sum(message["role"] == "assistant" for message in request.messages),
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it is generated, until all responses have ended. Raises ServerStopping."""
        left = len(self.readers)
        try:
            while left:
                index, update = await self._updates.get()
                if update is None:
                    raise ServerStopping
                reader = self.readers[index]
                if reader.completion is not None:  # by a stop string; the engine had sampled on
                    continue
                delta = reader.add(update)
                if reader.completion is not None:
                    left -= 1
                    self._engine.cancel([self._generations[index].id])
                yield delta
        finally:
            # The client has gone, or the server is stopping.
            self._engine.cancel(generation.id for generation in self._generations)

    async def completions(self) -> list[ChatCompletion]:
        """All responses, when they have ended. Raises ServerStopping."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass
        return [reader.completion for reader in self.readers if reader.completion is not None]


async def sent_events(encoder: Events, running: RunningRequest) -> AsyncIterator[str]:
    """Server-sent events of a streamed reply."""
    try:
        yield encoder.start(running.prompt_ids)
        async with aclosing(running.deltas()) as deltas:
            async for delta in deltas:
                completion = running.readers[delta.index].completion
                text = encoder.delta(delta) + ("" if completion is None else encoder.finish(delta.index, completion))
                if text:
                    yield text
        yield encoder.end()
    except ServerStopping:
        yield encoder.fail(503, _STOPPING)
