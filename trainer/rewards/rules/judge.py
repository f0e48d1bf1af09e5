"""LLM judge: a score from another model by OpenAI's chat completions API, which vLLM, SGLang and others serve too."""

import json
import os
import re
from typing import Any

from configs.schema.ppo import JudgeRewardConfig
from trainer.rewards.http_client import RequestRefused, post, with_retries

_SCORE = re.compile(r"score[*_`\s]*[:=][*_`\s]*(-?[0-9]+(?:\.[0-9]+)?|-?\.[0-9]+)(?![0-9]*\.?[0-9/])", re.IGNORECASE)
_FIELD = re.compile(r"\{(question|answer|ground_truth)\}")


class JudgeError(RuntimeError):
    """The judge gave no usable score: the reward has failed."""


def score(answer: str, ground_truth: Any, extra_info: dict[str, Any], config: JudgeRewardConfig) -> float:
    """Last ``Score: X`` of the judge's reply divided by ``max_score``, from 0 to 1.

    Raises JudgeError without a reply, for a reply without such a score and for a score out of range; ValueError if the prompt
    contains {question} and extra_info has none.
    """
    if config.url is None or config.model is None:  # a row's data_source may select the judge without its configuration
        raise JudgeError(f"no judge is configured: reward.judge.url={config.url} reward.judge.model={config.model}; set both")
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": prompt(config.prompt, answer, ground_truth, extra_info)}],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }
    url = f"{config.url.rstrip('/')}/chat/completions"
    return parse(_ask(url, body, config), config.max_score)


def prompt(template: str, answer: str, ground_truth: Any, extra_info: dict[str, Any]) -> str:
    """Fill {question}, {answer} and {ground_truth} into the template."""
    # In one pass: a response that contains «{ground_truth}» must not be expanded.
    if "{question}" in template and extra_info.get("question") is None:
        raise ValueError("reward.judge.prompt has {question}, but the row's extra_info has no question: add it to the data")
    fields = {"question": extra_info.get("question"), "answer": answer, "ground_truth": ground_truth}
    return _FIELD.sub(lambda match: str(fields[match[1]]), template)


def parse(reply: str, max_score: float) -> float:
    """Last ``Score: X`` of a reply, divided by max_score. Raises JudgeError if there is none or X is not in 0 .. max_score."""
    found = _SCORE.findall(reply)
    if not found:
        raise JudgeError(f"the judge's reply has no `Score: X`: {reply[-100:]!r}")
    value = float(found[-1])
    if not 0.0 <= value <= max_score:
        raise JudgeError(f"the judge's score is {value:g}, not in 0 .. {max_score:g} (reward.judge.max_score)")
    return value / max_score


def _ask(url: str, body: dict[str, Any], config: JudgeRewardConfig) -> str:
    """Send the request, with retries; return the text of the reply. Raises JudgeError."""
    data, key = json.dumps(body).encode(), os.environ.get(config.api_key_env)

    def request() -> Any:
        return post(url, data, token=key, timeout=config.timeout, timeout_key="reward.judge.timeout")

    try:
        return _content(with_retries(request, retries=config.retries, backoff=config.backoff))
    except RequestRefused as error:
        raise JudgeError(f"no reply from the judge: {error}") from error


def _content(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"the judge's reply is not a chat completion: {json.dumps(reply)[:100]}") from error
    if not isinstance(content, str):
        raise JudgeError(f"the judge's reply has no text: {json.dumps(reply)[:100]}")
    return content
