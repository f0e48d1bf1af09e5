"""Wire format between trainer and reward server: OpenRLHF's format with additional fields.

    {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}

query: prompts with responses, special tokens included; labels: ground truths. Additional fields of the request: responses
(without prompt and special tokens), messages (unrendered prompts), token_ids and tokenizers (a hash of the tokenizer that
produced them), data_sources, extra_infos, finished, whole (messages are a conversation up to its last turn). Additional fields
of the reply: errors (why a reward is null), timed_out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any

from trainer.rewards.scoring import Response, Score, finite


def to_request(answers: Sequence[Response]) -> dict[str, list]:
    return {
        "query": [answer.query for answer in answers],
        "prompts": [answer.prompt for answer in answers],
        "labels": [answer.ground_truth for answer in answers],
        "responses": [answer.solution_str for answer in answers],
        "data_sources": [answer.data_source for answer in answers],
        "extra_infos": [answer.extra_info for answer in answers],
        "finished": [answer.finished for answer in answers],
        "messages": [answer.messages for answer in answers],
        "token_ids": [answer.ids for answer in answers],
        "tokenizers": [answer.tokenizer_id for answer in answers],
        "whole": [answer.whole for answer in answers],
    }


def from_request(body: Any) -> list[Response]:
    """Parse a request, of at least one response. Raises ValueError, one line.

    With OpenRLHF's fields only, a response is its query without the prompt, has no data source and counts as finished.
    """
    if not isinstance(body, dict) or not isinstance(body.get("query"), list) or not body["query"]:
        raise ValueError('the request must be a JSON object with "query", a list of texts')
    n = len(body["query"])
    queries = _column(body, "query", str, [])
    prompts = _column(body, "prompts", str, [""] * n)
    heads = [prompt if query.startswith(prompt) else "" for query, prompt in zip(queries, prompts, strict=True)]
    tails = [query.removeprefix(head) for query, head in zip(queries, heads, strict=True)]
    responses = _column(body, "responses", str, tails)
    written = [tail if tail != response else "" for tail, response in zip(tails, responses, strict=True)]
    columns = zip(
        _column(body, "data_sources", str, [""] * n),
        responses,
        _column(body, "labels", object, [None] * n),
        _column(body, "extra_infos", dict, [{}] * n),
        _column(body, "finished", bool, [True] * n),
        heads,
        written,
        _column(body, "messages", str | list | None, [None] * n),
        _column(body, "token_ids", list | None, [None] * n),
        _column(body, "tokenizers", str, [""] * n),
        _column(body, "whole", bool, [False] * n),
        strict=True,
    )
    return [Response(*row) for row in columns]


def to_reply(scores: Sequence[Score]) -> dict[str, Any]:
    """Encode scores; the reward of a failed response is null."""
    rewards = [score.value for score in scores]
    names = sorted({name for score in scores for name in score.extra})
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {name: [score.extra.get(name) for score in scores] for name in names},
        "errors": [score.error for score in scores],
        "timed_out": [score.timed_out for score in scores],
    }


def from_reply(body: Any, n: int) -> list[Score]:
    """Parse the scores of n responses. Raises ValueError, one line, for an invalid reply.

    A reward that is not a finite number fails its own response only. extra_logs becomes the extra of each score; a single number
    applies to all. scores, by which OpenRLHF filters groups, is kept as an extra only if it differs from the rewards.
    """
    rewards = body.get("rewards") if isinstance(body, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'its reply has no list "rewards": {body!r:.100}')
    if len(rewards) != n:
        raise ValueError(f"{len(rewards)} rewards for {n} responses")
    extras: list[dict[str, float]] = [{} for _ in rewards]
    logs = body.get("extra_logs")
    columns = {str(name): values for name, values in logs.items()} if isinstance(logs, dict) else {}
    if body.get("scores") not in (None, rewards):
        columns["scores"] = body["scores"]
    # Optional fields of servers by others are ignored if malformed; only the rewards themselves must be valid.
    for name, values in columns.items():
        each = values if isinstance(values, list) else [values] * n
        for extra, value in zip(extras, each if len(each) == n else (), strict=False):
            if (number := finite(value)) is not None:
                extra[name] = number
    errors = body.get("errors")
    why = errors if isinstance(errors, list) and len(errors) == n else [None] * n
    late = body.get("timed_out")
    late = [one is True for one in late] if isinstance(late, list) and len(late) == n else [False] * n
    return [_score(*row) for row in zip(rewards, extras, why, late, strict=True)]


def _score(reward: Any, extra: dict[str, float], error: Any, timed_out: bool) -> Score:
    value = finite(reward)
    if value is None:
        why = error if isinstance(error, str) else f"the server's reward is {reward!r:.60}, not a finite number"
        return Score(None, {}, why, timed_out)
    return Score(value, extra, None)


def _column(body: dict[str, Any], name: str, kind: type | UnionType, otherwise: list) -> list:
    """A field of the request: a list of ``kind`` with one entry per query; ``otherwise`` if absent. Raises ValueError."""
    values = body.get(name)
    if values is None:
        return otherwise
    if not isinstance(values, list) or len(values) != len(body["query"]):
        raise ValueError(f'"{name}" must be a list as long as "query", {len(body["query"])}')
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise ValueError(f'"{name}"[{i}] is {value!r:.60}; it must be {kind.__name__ if isinstance(kind, type) else kind}')
    return values
