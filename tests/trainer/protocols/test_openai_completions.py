"""OpenAI's completions: parsing, replies, streams."""

from importlib import import_module
from typing import Any

import pytest

from tests.trainer.protocols.streams import HEAD, completion, stream
from trainer.protocols import openai_completions
from trainer.protocols.common import BadRequest


def parse(**changes: Any) -> Any:
    return openai_completions.parse({"model": "m", "prompt": "hi"} | changes)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, expected: Any) -> None:
    assert parse(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**changes)
    assert refused.value.param == param


def test_a_reply_counts_each_prompt_once() -> None:
    request = parse(prompt=["a", "b"], n=2, logprobs=0, return_token_ids=True)
    reply = openai_completions.reply(request, [completion()] * 4, HEAD)
    assert reply["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    choice = reply["choices"][3]
    assert (choice["index"], choice["text"], choice["token_ids"]) == (3, "Hello é", [7, 8])
    assert choice["logprobs"] == {
        "tokens": ["Hello", " é"], "token_logprobs": [-0.5, -1.0], "top_logprobs": None, "text_offset": [0, 5],
    }  # fmt: skip


def test_a_stream_is_the_reply_in_parts() -> None:
    request = parse(prompt=["a", "b"], stream=True, logprobs=0, return_token_ids=True, stream_options={"include_usage": True})
    events = stream(openai_completions.events(request, HEAD), completion(), completion(text="other"))
    assert events[-1] == (None, "[DONE]") and events[-2][1]["usage"]["prompt_tokens"] == 6
    choices = [choice for _, data in events[:-2] for choice in data["choices"]]
    assert "".join(choice["text"] for choice in choices if choice["index"] == 1) == "other"
    assert [c["logprobs"]["text_offset"] for c in choices if c["index"] == 0 and c["logprobs"]] == [[0], [5]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop", "stop"]


def test_replies_and_chunks_are_those_of_the_sdk() -> None:
    types = import_module("openai.types")
    request = parse(logprobs=0, stream=True)
    types.Completion.model_validate(openai_completions.reply(request, [completion()], HEAD), strict=True)
