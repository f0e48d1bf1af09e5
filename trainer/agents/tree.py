"""Conversation tree: every prompt that was sent to the engine and every turn that was sampled, as token ids; rows for training.

Problem: a program talks to the model in messages, and sends all of them with every call. Training needs the ids that were
sampled and those they were sampled after. Templates rewrite earlier turns, tokenisers split the same text in several ways, and
programs edit, retry and branch. Idea: a call continues the longest recorded conversation that its messages begin with and that
the template still renders as it did directly after the turn (trainer/data/seam.py); recorded ids stand for it, and only what
follows is tokenised. A path of the tree is then exactly what the engine processed. If sampled turns are left over, they are part
of the new prompt as plain text, the conversation is split there, and its reason is counted.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Literal, Protocol

import numpy as np

from trainer.agents.messages import THINKING, call_ids, canonical, difference
from trainer.data.encoding import Message, parsed
from trainer.data.seam import Break, Seams, appended
from workers.seeding import seed_of

ROOT = -1


@dataclass(slots=True)
class Node:
    """A part of a conversation: a prompt, or a turn that was sampled after it. Plain data.

    parent: index of the node before it, or ROOT. name: hash of the path, independent of the order of arrival. prefix: hash of all
    messages up to here; n_messages: their number. turn: number of sampled turns up to here. messages: those that the node adds.
    text: rendering up to here; of a sampled turn, from its first continuation on. ids: tokens that the node adds; log_probs and
    versions: of each, if they were sampled. truncated: the turn has no stop token.
    """

    parent: int
    role: Literal["prompt", "assistant"]
    name: int
    prefix: int
    n_messages: int
    turn: int
    messages: list[Message]
    tools: list[Any] | None
    ids: list[int]
    text: str | None = None
    ordinal: int = 0
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model.

    key: hash of the prompt's path and of the sampling parameters; ordinal: number among calls with this key. Both make the seed,
    and are independent of the order in which different calls arrive. node: index of the prompt. A call that failed is submitted
    again as it is.
    """

    node: int
    key: int
    ordinal: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A path of the tree as a row for training, T tokens.

    input_ids: int64 (T,). response_mask: bool (T,), tokens trained in this row. rollout_log_probs: float32 (T,), 0 elsewhere.
    weight_version: int32 (T,), -1 elsewhere. part: number of the row in its trajectory. nodes: indices of the path.
    """

    trajectory: int
    part: int
    nodes: tuple[int, ...]
    input_ids: np.ndarray
    response_mask: np.ndarray
    rollout_log_probs: np.ndarray
    weight_version: np.ndarray


class Sampled(Protocol):
    """A sampled turn, as workers.rollout.base.Completion: its tokens, and of each its log-prob and version."""

    @property
    def token_ids(self) -> Collection[int]: ...
    @property
    def log_probs(self) -> Collection[float]: ...
    @property
    def versions(self) -> Collection[int]: ...
    @property
    def finish_reason(self) -> str: ...


class BrokenConversation(ValueError):
    """A call does not continue what was sampled, and on_break=refuse."""


class ConversationTree:
    """The calls and sampled turns of one trajectory.

    breaks: number of splits by reason: "edited" and "thinking" (a sampled turn came back changed, or without its thinking),
    "tools" (other tools), "truncated" (no stop token), "template" (rendered differently now), "seam" (no added token at its end).
    on_break: "split" makes the messages a new prompt, "refuse" raises BrokenConversation.
    """

    def __init__(self, seams: Seams, *, on_break: Literal["split", "refuse"] = "split") -> None:
        self.seams = seams
        self.on_break = on_break
        self.nodes: list[Node] = []
        self.breaks: Counter[str] = Counter()
        self._by_name: dict[int, int] = {}
        self._ending: dict[int, list[int]] = defaultdict(list)
        """Hash of the messages up to a sampled turn, inclusive -> nodes."""
        self._after: dict[int, list[int]] = defaultdict(list)
        """Hash of the messages before a sampled turn -> nodes."""
        self._sampled: set[str] = set()
        """Canonical messages of all sampled turns."""
        self._calls: Counter[int] = Counter()
        self._prompts: dict[str, str] = {}
        """Messages and tools, as JSON -> prompt, during a call."""
        # A call has all messages of the calls before it.
        self._parsed: dict[str, tuple[Message, str]] = {}
        """Message as JSON -> parsed, and canonical."""
        self._tools: dict[str, list[Any] | None] = {}
        """Tools as JSON -> a copy."""
        self._prefixes: dict[tuple[int, str], int] = {}
        """Hash of some messages, and the next one -> hash of both."""

    def request(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None, sampling: Mapping[str, Any] | None = None
    ) -> Call:
        """Prompt of a call. sampling: its parameters, JSON, as part of its identity.

        An equal prompt is shared by all calls with it. Raises Refused if the template rejects the messages, and with
        on_break=refuse BrokenConversation if sampled turns came back that cannot be continued.
        """
        read, tools_text = [self._read(message) for message in messages], json.dumps(tools)
        if tools_text not in self._tools:
            self._tools[tools_text] = json.loads(tools_text)
        new, tools = [message for message, _ in read], self._tools[tools_text]
        self._prompts.clear()
        prefixes = list(accumulate((text for _, text in read), self._prefix, initial=0))
        parent, start, text, ids, broken = self._continue_longest(new, prefixes, tools)
        broken = broken or self._changed(new, prefixes, start)
        if broken and self.on_break == "refuse":
            at, found = broken
            raise BrokenConversation(
                f"on_break=refuse: messages[{at}] ({new[at]['role']}) cannot be continued ({found.reason}): {found.detail}; "
                "return sampled turns and all messages before them unchanged and append after them, or use on_break=split"
            )
        before = self.nodes[parent] if parent != ROOT else None
        # Of the path and the text, so that calls which arrive in another order share the same nodes.
        name = seed_of(before.name if before else 0, prefixes[-1], tools_text, text)
        if name not in self._by_name:
            if broken:
                self.breaks[broken[1].reason] += 1
            turn = before.turn if before else 0
            self._add(Node(parent, "prompt", name, prefixes[-1], len(new), turn, new[start:], tools, ids, text))
        key = seed_of(name, json.dumps(sampling, sort_keys=True))
        self._calls[key] += 1
        node = self._by_name[name]
        return Call(node, key, self._calls[key] - 1, self.ids(node))

    def request_ids(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Call:
        """Prompt of a call that has token ids in place of messages; it continues the longest recorded path."""
        ids, parent, covered = tuple(prompt_ids), ROOT, 0
        for index, node in enumerate(self.nodes):
            if node.role == "assistant":
                path = self.ids(index)
                if len(path) > covered and ids[: len(path)] == path:
                    parent, covered = index, len(path)
        before = self.nodes[parent] if parent != ROOT else None
        added = ids[covered:]
        name = seed_of(before.name if before else 0, *added)
        if name not in self._by_name:
            place, turn = (before.n_messages, before.turn) if before else (0, 0)
            self._add(Node(parent, "prompt", name, name, place + 1, turn, [], None, [*added]))
        key = seed_of(name, json.dumps(sampling, sort_keys=True))
        self._calls[key] += 1
        return Call(self._by_name[name], key, self._calls[key] - 1, ids)

    def record(self, call: Call, completion: Sampled, message: Mapping[str, Any]) -> int:
        """Add the turn that was sampled for a call; returns its node.

        completion: the whole response, with its stop token. message: the assistant's message parsed from it, as the program gets
        it. Raises ValueError for a response without tokens, with another number of log-probs or versions, or recorded before.
        """
        n, before, (new,) = len(completion.token_ids), self.nodes[call.node], parsed([message])
        if n == 0 or {len(completion.log_probs), len(completion.versions)} != {n}:
            sizes = f"{n} tokens, {len(completion.log_probs)} log_probs, {len(completion.versions)} versions"
            raise ValueError(
                f"a response has a log-prob and a version for each of its tokens, and at least one token; got {sizes}"
            )
        name = seed_of(call.key, call.ordinal)
        if name in self._by_name:
            raise ValueError(f"the response to call {call.ordinal} of key {call.key} is already recorded")
        text = canonical(new)
        prefix = seed_of(before.prefix, text)
        # Of arrays too, whose elements are not Python's.
        ids, versions, log_probs = (
            np.asarray(column).tolist() for column in (completion.token_ids, completion.versions, completion.log_probs)
        )
        node = Node(
            parent=call.node, role="assistant", name=name, prefix=prefix, n_messages=before.n_messages + 1, turn=before.turn + 1,
            messages=[new], tools=before.tools, ids=ids, ordinal=call.ordinal,
            log_probs=log_probs, versions=versions, truncated=completion.finish_reason != "stop",
        )  # fmt: skip
        self._ending[prefix].append(len(self.nodes))
        self._after[before.prefix].append(len(self.nodes))
        self._sampled.add(text)
        return self._add(node)

    def extend(self, index: int, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[int]] | Break:
        """Rendered text and ids to add of a prompt that continues the sampled turn ``index`` by ``messages`` (parsed)."""
        node = self.nodes[index]
        if node.tools != tools:
            return Break("tools", "it was sampled with other tools")
        if node.truncated:
            return Break("truncated", "its response was truncated, so no stop token ends it")
        recorded = self._messages(index)
        if node.text is None:
            prompt = self.nodes[node.parent].text
            assert prompt is not None
            end = self.seams.up_to_stop(prompt, self.seams.render_calls(recorded, node.tools, prompt=False), node.ids[-1])
            if isinstance(end, Break):
                return end
            node.text = end
        # Recorded messages, not those of the call: equal ones may differ in the order of keys, which templates write.
        text = self._prompt(recorded + messages, node.tools)
        added = appended(node.text, text)
        ids = added if isinstance(added, Break) else self.seams.ids_after(node.ids[-1], added)
        return ids if isinstance(ids, Break) else (text, ids)

    def rows(self, trajectory: int) -> list[Row]:
        """A row for every sampled turn that no other continues, in an order that is independent of the order of arrival.

        Each sampled token is trained in the first row that contains it.
        """
        sampled = [i for i, node in enumerate(self.nodes) if node.role == "assistant"]
        inner = {before for i in sampled for before in self.path(i)[:-1]}
        paths = sorted((self.path(i) for i in sampled if i not in inner), key=lambda path: [self._rank(i) for i in path])
        trained: set[int] = set()
        rows = []
        for part, path in enumerate(paths):
            here = {i for i in path if self.nodes[i].role == "assistant"} - trained
            trained |= here
            columns = [self._columns(i, trained=i in here) for i in path]
            rows.append(Row(trajectory, part, tuple(path), *map(np.concatenate, zip(*columns, strict=True))))
        return rows

    def ids(self, index: int) -> tuple[int, ...]:
        """Token ids from the start of the conversation up to the end of ``index``."""
        return tuple(chain.from_iterable(self.nodes[i].ids for i in self.path(index)))

    def path(self, index: int) -> list[int]:
        """Indices of the nodes from the start of the conversation to ``index``."""
        found = []
        while index != ROOT:
            found.append(index)
            index = self.nodes[index].parent
        return found[::-1]

    def _read(self, message: Mapping[str, Any]) -> tuple[Message, str]:
        """A message, parsed and canonical."""
        text = json.dumps({**message})
        if text not in self._parsed:
            (new,) = parsed([message])
            self._parsed[text] = new, canonical(new)
        return self._parsed[text]

    def _prefix(self, before: int, text: str) -> int:
        """Hash of messages: of those before the last one, and the last one, canonical."""
        if (before, text) not in self._prefixes:
            self._prefixes[before, text] = seed_of(before, text)
        return self._prefixes[before, text]

    def _messages(self, index: int) -> list[Message]:
        return [message for i in self.path(index) for message in self.nodes[i].messages]

    def _continue_longest(
        self, messages: list[Message], prefixes: list[int], tools: list[Any] | None
    ) -> tuple[int, int, str, list[int], tuple[int, Break] | None]:
        """Parent of a prompt, number of its messages that the parent covers, its text, the ids it adds.

        Last: the longest recorded conversation that could not be continued (its last message), and why.
        """
        broken = None
        # Longest first: a shorter conversation would tokenise a sampled turn anew that a longer one still has.
        for end in range(len(messages), 0, -1):
            for index in self._alike(prefixes[end], messages[:end]):
                found = self.extend(index, messages[end:], tools)
                if not isinstance(found, Break):
                    return index, end, *found, broken
                broken = broken or (end - 1, found)
        text = self._prompt(messages, tools)
        return ROOT, 0, text, self.seams.ids(text), broken

    def _alike(self, prefix: int, messages: list[Message]) -> list[int]:
        """Sampled turns that end recorded conversations equal to ``messages``; first those with equal ids of calls."""
        found = self._ending.get(prefix, [])
        if len(found) < 2:
            return found
        ids = call_ids(messages)
        return sorted(found, key=lambda i: (call_ids(self._messages(i)) != ids, self.nodes[i].ordinal, self.nodes[i].name))

    def _changed(self, messages: list[Message], prefixes: list[int], start: int) -> tuple[int, Break] | None:
        """The first sampled turn from ``start`` on that came back changed, or after other messages than those before it."""
        for i in range(start, len(messages)):
            message = messages[i]
            if message["role"] != "assistant":
                continue
            if siblings := [self.nodes[j] for j in self._after.get(prefixes[i], ())]:
                siblings.sort(key=lambda node: (node.ordinal, node.name))
                bare = canonical(message, without=THINKING)
                close = [node for node in siblings if canonical(node.messages[0], without=THINKING) == bare]
                detail = difference(message, (close or siblings)[0].messages[0])
                return i, Break("thinking" if close else "edited", detail)
            if canonical(message) in self._sampled:
                return i, Break("edited", "it was sampled after other messages")
        return None

    def _prompt(self, messages: list[Message], tools: list[Any] | None) -> str:
        # A template that rewrites every turn makes a call look at all sampled turns, mostly with the same messages.
        key = json.dumps([messages, tools])
        if key not in self._prompts:
            self._prompts[key] = self.seams.render_calls(messages, tools, prompt=True)
        return self._prompts[key]

    def _add(self, node: Node) -> int:
        self._by_name[node.name] = len(self.nodes)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _rank(self, index: int) -> tuple[int, int, int]:
        node = self.nodes[index]
        return node.n_messages, node.ordinal, node.name

    def _columns(self, index: int, *, trained: bool) -> tuple[np.ndarray, ...]:
        """input_ids, response_mask, rollout_log_probs and weight_version of a node."""
        node = self.nodes[index]
        ids, n = np.array(node.ids, dtype=np.int64), len(node.ids)
        if not trained:
            return ids, np.zeros(n, dtype=bool), np.zeros(n, dtype=np.float32), np.full(n, -1, dtype=np.int32)
        return ids, np.ones(n, dtype=bool), np.array(node.log_probs, dtype=np.float32), np.array(node.versions, dtype=np.int32)
