"""Completions and their streams, for the tests of protocols."""

import json
from typing import Any

from trainer.protocols.common import ChatCompletion, Delta, Events, FunctionCall, Head

HEAD = Head("7", 1_795_350_178, "m")
CALLS = (FunctionCall("call_0_0", "add", {"a": 1, "b": "é"}), FunctionCall("call_0_1", "add", {}))


def completion(**changes: Any) -> ChatCompletion:
    base: dict[str, Any] = {
        "text": "Hello é", "finish_reason": "stop", "prompt_token_ids": [1, 2, 3], "token_ids": [7, 8], "log_probs": [-0.5, -1.0],
        "tokens": ["Hello", " é"],
    }  # fmt: skip
    return ChatCompletion(**(base | changes))


def deltas(of: ChatCompletion, index: int = 0) -> list[Delta]:
    """The completion in two deltas: the first token with half of the text, and the rest."""
    half = len(of.text) // 2
    return [
        Delta(index, of.text[:half], of.thinking, (), of.token_ids[:1], of.log_probs[:1], of.tokens[:1]),
        Delta(index, of.text[half:], "", of.calls, of.token_ids[1:], of.log_probs[1:], of.tokens[1:]),
    ]


def stream(encoder: Events, *completions: ChatCompletion) -> list[tuple[str | None, Any]]:
    """Events of the encoder as (name, data), with «[DONE]» as text."""
    text = encoder.start(completions[0].prompt_token_ids)
    for index, one in enumerate(completions):
        text += "".join(encoder.delta(delta) for delta in deltas(one, index))
    text += "".join(encoder.finish(index, one) for index, one in enumerate(completions)) + encoder.end()
    return read(text)


def read(text: str) -> list[tuple[str | None, Any]]:
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found
