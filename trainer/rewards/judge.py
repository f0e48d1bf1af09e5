"""Another model's opinion, asked for over HTTP: the chat completions of OpenAI's API, which vLLM, SGLang and others serve too."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from email.message import Message
from typing import IO, Any

from configs.schema.ppo import JudgeRewardConfig

_SCORE = re.compile(r"score[*_`\s]*[:=][*_`\s]*(-?[0-9]+(?:\.[0-9]+)?|-?\.[0-9]+)(?![0-9]*\.?[0-9/])", re.IGNORECASE)
_FIELD = re.compile(r"\{(question|answer|ground_truth)\}")
_MAY_PASS = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP: a later request may fare better
_MAX_REPLY = 1 << 22  # bytes


class JudgeError(RuntimeError):
    """There is no opinion: the reward has failed."""


def score(answer: str, ground_truth: Any, extra_info: dict[str, Any], config: JudgeRewardConfig) -> float:
    """The last ``Score: X`` of the judge's reply, divided by ``max_score``: 0 to 1.

    Raises JudgeError if no reply comes, or one without such a score, or the score lies outside; ValueError if the prompt wants a
    question and extra_info has none.
    """
    if config.url is None or config.model is None:  # a row may name the judge where the configuration does not
        raise JudgeError(f"there is no judge: reward.judge.url={config.url} reward.judge.model={config.model}")
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": prompt(config.prompt, answer, ground_truth, extra_info)}],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }
    url = f"{config.url.rstrip('/')}/chat/completions"
    return parse(_ask(url, body, config), config.max_score)


def prompt(template: str, answer: str, ground_truth: Any, extra_info: dict[str, Any]) -> str:
    """The template with {question}, {answer} and {ground_truth} filled in; what is filled in is not looked at again."""
    if "{question}" in template and "question" not in extra_info:
        raise ValueError("reward.judge.prompt has {question}, but the row's extra_info has no question: add it to the data")
    fields = {"question": extra_info.get("question"), "answer": answer, "ground_truth": ground_truth}
    return _FIELD.sub(lambda match: str(fields[match[1]]), template)


def parse(reply: str, max_score: float) -> float:
    """The last ``Score: X``. Raises JudgeError if there is none, or X is not in 0 .. max_score."""
    found = _SCORE.findall(reply)
    if not found:
        raise JudgeError(f"the judge's reply has no `Score: X`: {reply[-100:]!r}")
    value = float(found[-1])
    if not 0.0 <= value <= max_score:
        raise JudgeError(f"the judge's score is {value:g}, not in 0 .. {max_score:g} (reward.judge.max_score)")
    return value / max_score


class _Passing(Exception):
    """A failure that a later request may not meet."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _ask(url: str, body: dict[str, Any], config: JudgeRewardConfig) -> str:
    """The text of the reply; after a failure that may pass it asks again, ``retries`` times."""
    for attempt in range(config.retries + 1):
        try:
            return _request(url, body, config)
        except _Passing as error:
            if attempt == config.retries:
                raise JudgeError(f"no reply from the judge in {attempt + 1} requests; the last: {error}") from error
            time.sleep(config.backoff * 2**attempt)
    raise AssertionError("unreachable")


def _request(url: str, body: dict[str, Any], config: JudgeRewardConfig) -> str:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(config.api_key_env):
        headers["Authorization"] = f"Bearer {key}"
    deadline = time.monotonic() + config.timeout
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with _OPENER.open(request, timeout=config.timeout) as response:
            reply = json.loads(_read(response, deadline))
    except urllib.error.HTTPError as error:
        text = f"HTTP {error.code} from {url}: {error.read(200).decode(errors='replace')}"
        raise (_Passing if error.code in _MAY_PASS else JudgeError)(text) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, a time-out, a broken reply
        raise _Passing(f"{url}: {type(error).__name__}: {error}") from error
    return _content(reply)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. A server that lets it drip is late too."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the reply was not whole in reward.judge.timeout")
        if size > _MAX_REPLY:
            raise JudgeError(f"the judge's reply is longer than {_MAX_REPLY} bytes")
    return b"".join(parts)


def _content(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"the judge's reply is no chat completion: {json.dumps(reply)[:100]}") from error
    if not isinstance(content, str):
        raise JudgeError(f"the judge's reply has no text: {json.dumps(reply)[:100]}")
    return content
