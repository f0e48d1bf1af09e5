"""OpenAI's completions of a text or of token ids, without messages: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from trainer.protocols.common import (
    Body,
    ChatCompletion,
    ChatRequest,
    Delta,
    Events,
    Fields,
    Head,
    SamplingOptions,
    check_log_prob,
    choices_in,
    event,
    openai_error,
    openai_usage,
    seed_in,
    stops,
    temperature_in,
    tokens_in,
    top_k_in,
    top_p_in,
    unicode_text,
    usage_of,
)
from trainer.protocols.openai_chat import NO_EFFECT, include_usage

error = openai_error
_MOST_PROMPTS = 128


def parse(body: Body) -> ChatRequest:
    """The request of a body. Raises BadRequest for anything wrong or not supported."""
    fields = Fields(body)
    request = ChatRequest(
        model=fields.need("model", fields.text("model")),
        prompts=_prompts(fields, fields.need("prompt", fields.take("prompt"))),
        sampling=SamplingOptions(
            temperature=temperature_in(fields),
            top_p=top_p_in(fields),
            top_k=top_k_in(fields),
            max_tokens=tokens_in(fields, "max_tokens"),
            seed=seed_in(fields),
            stop=stops(fields.take("stop"), "stop"),
            n=choices_in(fields),
        ),
        stream=fields.flag("stream"),
        include_usage=include_usage(fields),
        logprobs=_logprobs(fields),
        return_token_ids=fields.flag("return_token_ids"),
    )
    fields.only("best_of", 1, request.sampling.n, why="all responses are returned")
    fields.only("echo", False)
    fields.only("suffix", "")
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0, 0.0, why="penalties are not supported")
    fields.ignore(*NO_EFFECT)
    fields.done()
    return request


def _logprobs(fields: Fields) -> bool:
    """Whether log-probs are wanted: 0 is «those of the sampled tokens only»."""
    value = fields.take("logprobs")
    if value is None or value is False:
        return False
    if value is True or (type(value) is int and value == 0):
        return True
    raise fields.refuse("logprobs", "log-probs of other tokens than the sampled one are not computed; use 0 or null")


def _prompts(fields: Fields, value: Any) -> tuple[str | tuple[int, ...], ...]:
    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and bool(item) and all(type(token) is int and 0 <= token < 1 << 31 for token in item)

    items = [value] if isinstance(value, str) or is_ids(value) else value
    if not isinstance(items, list) or not 0 < len(items) <= _MOST_PROMPTS:
        raise fields.refuse("prompt", f"must be a text, a list of token ids, or a list of at most {_MOST_PROMPTS} of them")
    if not all(isinstance(item, str) or is_ids(item) for item in items):
        raise fields.refuse("prompt", "a prompt is a text or a list of token ids, from 0 and not empty")
    return tuple(unicode_text(item, "prompt") if isinstance(item, str) else tuple(item) for item in items)


def reply(request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Body:
    """Body of the reply. completions: n of each prompt, in order."""
    choices = []
    for index, completion in enumerate(completions):
        choice: Body = {"index": index, "text": completion.text, "finish_reason": completion.finish_reason}
        choice["logprobs"] = _log_probs(completion, 0) if request.logprobs else None
        if request.return_token_ids:
            choice |= {"token_ids": list(completion.token_ids), "prompt_token_ids": list(completion.prompt_token_ids)}
        choices.append(choice)
    usage = openai_usage(*usage_of(completions, request.sampling.n))
    body = _head(head) | {"choices": choices, "usage": usage}
    return body | ({"prompt_token_ids": list(completions[0].prompt_token_ids)} if request.return_token_ids else {})


def _head(head: Head) -> Body:
    return {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model}


def _log_probs(new: ChatCompletion | Delta, start: int) -> Body:
    """Log-probs in the form of completions. start: characters of the response before them."""
    offsets = accumulate(map(len, new.tokens), initial=start)
    return {
        "tokens": list(new.tokens),
        "token_logprobs": [check_log_prob(value) for value in new.log_probs],
        "top_logprobs": None,
        "text_offset": [offset for offset, _ in zip(offsets, new.tokens, strict=False)],
    }


class _CompletionEvents:
    def __init__(self, request: ChatRequest, head: Head) -> None:
        self._request = request
        self._head = _head(head)
        n = request.sampling.n * len(request.prompts)
        self._characters, self._prompt_tokens, self._tokens = [0] * n, [0] * n, 0

    def _chunk(
        self, index: int, text: str, new: Delta | None = None, finish_reason: str | None = None, more: Body | None = None
    ) -> str:
        choice: Body = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": None} | (more or {})
        if new is not None and self._request.logprobs:
            choice["logprobs"] = _log_probs(new, self._characters[index])
            self._characters[index] += sum(map(len, new.tokens))
        if new is not None and self._request.return_token_ids:
            choice["token_ids"] = list(new.token_ids)
        return event(self._head | {"choices": [choice]} | ({"usage": None} if self._request.include_usage else {}))

    def start(self, prompt_token_ids: Sequence[int]) -> str:
        return ""

    def delta(self, delta: Delta) -> str:
        self._tokens += len(delta.token_ids)
        shows_tokens = delta.token_ids and (self._request.logprobs or self._request.return_token_ids)
        return self._chunk(delta.index, delta.text, delta) if delta.text or shows_tokens else ""

    def finish(self, index: int, completion: ChatCompletion) -> str:
        self._prompt_tokens[index] = len(completion.prompt_token_ids)
        more = {"prompt_token_ids": list(completion.prompt_token_ids)} if self._request.return_token_ids else {}
        return self._chunk(index, "", finish_reason=completion.finish_reason, more=more)

    def end(self) -> str:
        prompt_tokens = sum(self._prompt_tokens[:: self._request.sampling.n])
        usage = self._head | {"choices": [], "usage": openai_usage(prompt_tokens, self._tokens)}
        return (event(usage) if self._request.include_usage else "") + event("[DONE]")

    def fail(self, status: int, message: str) -> str:
        return event(error(status, message))


def events(request: ChatRequest, head: Head) -> Events:
    """Encoder of a streamed reply."""
    return _CompletionEvents(request, head)
