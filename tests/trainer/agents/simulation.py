"""Programs that talk to a model through a conversation tree, and a log of what the engine processed, to compare rows with.

Every choice of a program follows from its history, and every response from the identity of its call: the order of arrival is
the only thing that ``order`` changes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np

from tests.trainer.agents.families import EOS, Family, Message
from trainer.agents.messages import THINKING
from trainer.agents.tree import Call, ConversationTree, Row
from workers.rollout.base import Completion

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int", "b": "int"}}}]
WORDS = ("ab", "ba ", "a  b", "\n\nba", "user", " é", '{"a": 1}', "</think>", "bb\n", "assistant\n\n", "[INST", "b" * 5)


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def mark(rng: Random) -> str:
    """Text that no other message has."""
    return f"#{rng.getrandbits(32):08x}"


@dataclass
class Logged:
    """A call as the engine processed it: exact ids, log-probs that are serial numbers, versions."""

    prompt: tuple[int, ...]
    messages: list[Message]
    completion: Completion | None = None


@dataclass
class Outcome:
    tree: ConversationTree
    log: list[Logged] = field(default_factory=list)
    retokenised: list[bool] = field(default_factory=list)
    """Of each response, whether tokenising its text gives other ids."""


class Engine:
    """A model that writes turns in its family's format, with random tokenisation: any split into tokens of the vocabulary."""

    def __init__(self, family: Family) -> None:
        self.family = family
        vocabulary = family.tokenizer.get_vocab()
        self.added = {text: vocabulary[text] for text in (EOS, *family.added)}
        self.pieces = {text: number for text, number in vocabulary.items() if text not in self.added}

    def respond(self, call: Call, serial: int) -> tuple[Completion, Message]:
        """The response to a call, and the assistant's message that a parser makes of it. serial: log-prob of its first token."""
        rng = Random(call.key + call.ordinal)
        message = self._message(call, rng)
        text = self.family.write(message, rng)
        reason = "stop"
        stop = max((token for token in self.added if text.endswith(token)), key=len)
        ids = [number for part in self._parts(text.removesuffix(stop)) for number in self._ids(part, rng)]
        # A model may write the text of a stop token in ordinary tokens.
        if rng.random() < 0.03 and message["content"] and not message.get("tool_calls"):
            ids += self._split(stop, rng)
            message["content"] += stop
        chance = rng.random()
        if chance < 0.06:
            ids, reason = ids[: rng.randrange(len(ids)) + 1], "length"
            message = {"role": "assistant", "content": self.family.tokenizer.decode(ids)}
        else:
            ids.append(self.added[EOS if chance < 0.09 else stop])
        n, version = len(ids), rng.randrange(5)
        changed = rng.randrange(2 * n)
        completion = Completion(
            id=serial,
            token_ids=tuple(ids),
            log_probs=tuple(-float(serial + i) for i in range(n)),
            finish_reason=reason,
            versions=tuple(version + (i >= changed) for i in range(n)),
        )
        return completion, self._as_client_sees(message, rng)

    def _message(self, call: Call, rng: Random) -> Message:
        message: Message = {"role": "assistant", "content": f"{rng.choice(WORDS)}{mark(rng)} {rng.choice(WORDS)}"}
        if rng.random() < 0.5:
            message[self.family.thinking] = f"{rng.choice(WORDS).strip()}{rng.getrandbits(16):x}"
        if rng.random() < 0.4:
            message["content"] = ""
            message["tool_calls"] = [
                {
                    "id": f"call_{call.key:x}_{call.ordinal}_{i}",
                    "type": "function",
                    "function": {
                        "name": "add",
                        "arguments": {"b": mark(rng), "a": rng.choice(WORDS), "é": [1.5, None]},
                    },
                }
                for i in range(rng.randrange(self.family.most_calls) + 1)
            ]
        return message

    def _as_client_sees(self, message: Message, rng: Random) -> Message:
        seen = copied(message)
        for call in seen.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if "tool_calls" in seen and rng.random() < 0.5:
            seen["content"] = None
        return seen

    def _parts(self, text: str) -> Iterator[str]:
        """Text cut before and after every added token."""
        while text:
            at = {text.find(token): token for token in self.added if token in text}
            if not at:
                yield text
                return
            first = min(at)
            if first:
                yield text[:first]
            yield at[first]
            text = text[first + len(at[first]) :]

    def _ids(self, part: str, rng: Random) -> list[int]:
        return [self.added[part]] if part in self.added else self._split(part, rng)

    def _split(self, text: str, rng: Random) -> list[int]:
        letters = text.encode().decode("latin-1").translate(LETTERS)
        start, stride = rng.randrange(4), rng.randrange(2, 5)
        parts = [letters[:start], *(letters[i : i + stride] for i in range(start, len(letters), stride))]
        return [self.pieces[piece] for part in parts for piece in ((part,) if part in self.pieces else part)]


MARK = re.compile("#[0-9a-f]{8}")
PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}
"""Byte -> character of byte-level BPE."""


@cache
def engine_of(family: Family) -> Engine:
    return Engine(family)


def converse(family: Family, seed: int, order: int = 0) -> Outcome:
    """A conversation of one or more programs. order: seed of the order in which requests and responses arrive."""
    arrival, start, engine = Random(order), Random(seed), engine_of(family)
    found = Outcome(ConversationTree(family.seams))
    first = [{"role": "user", "content": f"{start.choice(WORDS)}{seed}"}]
    if start.random() < 0.3:
        first.insert(0, {"role": "system", "content": start.choice(WORDS)})
    turns = start.choice((1, 1, 2, 2, 3, 4))
    programs: list[tuple[list[Message], int]] = [(first, turns)]
    in_flight: list[tuple[Call, Logged, list[Message], int]] = []
    serial = 1
    while programs or in_flight:
        i = arrival.randrange(len(programs) + len(in_flight)) if order else len(programs) + len(in_flight) - 1
        if i < len(programs):
            history, left = programs.pop(i)
            for messages, tools in requests(history, left, seed):
                sent = copied(messages)
                call = found.tree.request(sent, tools)
                spoil(sent)
                logged = Logged(call.prompt_ids, messages)
                if Random(call.key + call.ordinal + 1).random() < 0.97:  # the others fail
                    found.log.append(logged)
                    in_flight.append((call, logged, messages, left - 1))
            continue
        call, logged, messages, left = in_flight.pop(i - len(programs))
        completion, message = engine.respond(call, serial)
        serial += len(completion.token_ids)
        logged.completion = completion
        if serial % 16 == 0:
            found.retokenised.append(retokenised(family, completion))
        given = copied(message)
        found.tree.record(call, completion, given)
        spoil([given])
        if left:
            programs.append(([*messages, message], left))
    return found


def retokenised(family: Family, completion: Completion) -> bool:
    return family.seams.ids(family.tokenizer.decode(completion.token_ids)) != list(completion.token_ids)


def spoil(messages: list[Message]) -> None:
    """Change messages after they were handed over."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = "spoiled"
        message["content"] = "spoiled"
    messages.clear()


def requests(history: list[Message], left: int, seed: int) -> Iterator[tuple[list[Message], Any]]:
    """The calls that a program with this history makes next."""
    rng = Random(f"{seed}{left}{json.dumps(history)}")
    messages = [varied(message, rng) for message in history]
    if len(messages) > 2 and rng.random() < 0.15:
        edit(messages, rng)
    tools = None if rng.random() < 0.03 else TOOLS
    chance = rng.random()
    kinds = 2 if chance > 0.92 else 1  # a branch: two different continuations
    repeats = 2 if chance < 0.12 else 1  # equal calls: best of n, retries
    for kind in range(kinds):
        branch = [*messages, *news(messages, rng, kind)]
        for _ in range(repeats):
            yield branch, tools


def news(messages: list[Message], rng: Random, kind: int) -> list[Message]:
    last = messages[-1]
    if last["role"] != "assistant" or rng.random() < 0.02:
        return []
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{rng.choice(WORDS)}{mark(rng)} {kind}"}
        for call in last.get("tool_calls") or []
    ]
    return results or [{"role": "user", "content": f"{kind}{mark(rng)} {rng.choice(WORDS)}"}]


def varied(message: Message, rng: Random) -> Message:
    """A message with the same meaning, as clients return it."""
    if message["role"] != "assistant" or rng.random() < 0.4:
        return dict(message)  # without a deep copy: only edit changes it
    message = copied(message)
    for i, call in enumerate(message.get("tool_calls") or []):
        call["index"] = i
        function = call["function"]
        if isinstance(function["arguments"], str):
            arguments = dict(reversed(json.loads(function["arguments"]).items()))
            function["arguments"] = rng.choice((arguments, json.dumps(arguments, indent=rng.choice((None, 2)))))
    message |= {"refusal": None, "tool_calls": message.get("tool_calls") or rng.choice((None, []))}
    if not message.get("content") and rng.random() < 0.3:
        message.pop("content", None)
    return dict(reversed(message.items()))


def edit(messages: list[Message], rng: Random) -> None:
    """Change something that was part of an earlier call."""
    kind = rng.randrange(4)
    if kind == 0:
        message = rng.choice(messages)
        message["content"] = f"{message.get('content') or ''}, edited"
        message.pop("thinking", None)  # GPT-OSS takes no content and thinking in a turn with calls
    elif kind == 1:
        for message in messages:
            message.pop("reasoning_content", None), message.pop("thinking", None)
    elif kind == 2:
        at = next(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[at]["content"] = "summary"
    else:
        at = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[at + 1 : at + 1] = [{"role": "assistant", "content": "not sampled"}, {"role": "user", "content": "next"}]


def check(found: Outcome, rows: list[Row]) -> None:
    """Compare rows with the log alone."""
    recorded = [logged for logged in found.log if logged.completion is not None]
    by_serial = {logged.completion.log_probs[0]: logged for logged in recorded if logged.completion}
    whole = {(*logged.prompt, *logged.completion.token_ids) for logged in recorded if logged.completion}
    seen: set[float] = set()
    for part, row in enumerate(rows):
        assert (row.trajectory, row.part) == (7, part)
        assert tuple(row.input_ids.tolist()) in whole  # a prompt that the engine got and the response it sampled
        assert row.response_mask[-1]
        trained = np.flatnonzero(row.response_mask).tolist()
        assert not row.rollout_log_probs[~row.response_mask].any() and (row.weight_version[~row.response_mask] == -1).all()
        while trained:
            start = trained[0]
            serial = float(row.rollout_log_probs[start])
            logged = by_serial[serial]  # KeyError: a response that does not begin at its first token
            assert serial not in seen and logged.completion is not None
            seen.add(serial)
            end = start + len(logged.completion.token_ids)
            assert trained[: end - start] == list(range(start, end))
            trained = trained[end - start :]
            assert tuple(row.input_ids[:start].tolist()) == logged.prompt
            assert tuple(row.input_ids[start:end].tolist()) == logged.completion.token_ids
            assert tuple(row.rollout_log_probs[start:end].tolist()) == logged.completion.log_probs
            assert tuple(row.weight_version[start:end].tolist()) == logged.completion.versions
    assert seen == set(by_serial)  # every sampled token, exactly once
    for logged in recorded[::3]:
        # Prompts have all messages of their call once, in order, sampled or rendered.
        text = str(found.tree.seams.tokenizer.decode(list(logged.prompt)))
        visible = [{name: value for name, value in m.items() if name not in THINKING} for m in logged.messages]
        assert MARK.findall(text) == MARK.findall(json.dumps(visible))
