"""The conversation tree: ids trained are the ids sampled, whatever programs and chat templates do."""

import copy
import json
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.trainer.agents.families import CORPUS, DEEPSEEK, EOS, FAMILIES, GPT_OSS, LLAMA3, PLAIN, QWEN3, QWEN25, Family, Message
from tests.trainer.agents.simulation import TOOLS, check, converse
from trainer.agents.tree import BrokenConversation, Call, ConversationTree, Row
from trainer.data.encoding import Refused, parsed
from trainer.data.seam import Seams
from workers.rollout.base import Completion

USER = {"role": "user", "content": "a"}
MORE = {"role": "user", "content": "b"}
ANSWER = {"role": "assistant", "content": "ba"}
THOUGHT = ANSWER | {"reasoning_content": "bb"}


def add(identity: str, **arguments: Any) -> Message:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


CALL: Message = {"role": "assistant", "content": None, "tool_calls": [add("call_1", a=1, b=2)]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


class Session:
    """A tree with a model that answers as it is asked to."""

    def __init__(self, family: Family = QWEN25, **kwargs: Any) -> None:
        self.family, self.tree, self.sampled = family, ConversationTree(family.seams, **kwargs), 0

    def say(self, call: Call, message: Message, *, stop: str | None = None, reason: Any = "stop", text: str | None = None) -> int:
        """Record a response, written as by the family's model. stop: another stop token. text: the whole response."""
        written = copy.deepcopy(message) | {"content": message.get("content") or ""}
        for tool_call in written.get("tool_calls", []):
            tool_call["function"]["arguments"] = json.loads(tool_call["function"]["arguments"])
        ids = self.family.seams.ids(text or self.family.write(written, Random(1)))
        if stop is not None:
            ids[-1:] = self.family.seams.ids(stop)
        log_probs = tuple(-float(self.sampled + i + 1) for i in range(len(ids)))
        self.sampled += len(ids)
        return self.tree.record(call, Completion(0, tuple(ids), log_probs, reason, (4,) * len(ids)), message)

    def turn(self, messages: list[Message], message: Message, *, tools: Any = None, **kwargs: Any) -> Call:
        call = self.tree.request(messages, tools)
        self.say(call, message, **kwargs)
        return call

    def rows(self) -> list[Row]:
        return self.tree.rows(0)


def text_of(family: Family, ids: Any) -> str:
    return str(family.tokenizer.decode(list(ids)))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("n", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_token_of_random_conversations_is_trained_once_after_the_prompt_it_was_sampled_after(
    family: Family, n: int
) -> None:
    breaks: Counter[str] = Counter()
    retokenised: list[bool] = []
    rows = trained_elsewhere = 0
    for seed in range(n):
        found = converse(family, seed)
        parts = found.tree.rows(7)
        check(found, parts)
        breaks += found.tree.breaks
        retokenised += found.retokenised
        rows += len(parts)
        n_sampled = [sum(found.tree.nodes[i].role == "assistant" for i in row.nodes) for row in parts]
        trained_elsewhere += sum(n_sampled) - sum(node.role == "assistant" for node in found.tree.nodes)
    # The conversations have what they are for: tokens that are not those of their text, breaks of all kinds, shared turns.
    assert np.mean(retokenised) > 0.7
    assert min(breaks[reason] for reason in ("edited", "thinking", "tools", "truncated")) >= n // 200
    rewriting = family.name in ("qwen3", "gpt-oss", "mistral")
    assert breaks["template"] > n / 4 if rewriting else breaks["template"] < n / 10
    assert breaks["seam"] + breaks["template"] >= n // 100
    assert rows > 1.3 * n and trained_elsewhere > n / 50


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_rows_do_not_depend_on_the_order_in_which_requests_and_responses_arrive(family: Family) -> None:
    differently = 0
    for seed in range(1000, 1030):
        outcomes = [converse(family, seed, order) for order in (0, 1, 2)]
        texts = []
        for found in outcomes:
            check(found, found.tree.rows(7))
            # Serial numbers of tokens follow the order of arrival; everything else is compared.
            texts.append(
                [(row.input_ids.tolist(), row.response_mask.tolist(), row.weight_version.tolist()) for row in found.tree.rows(7)]
            )
        assert texts[0] == texts[1] == texts[2]
        assert outcomes[0].tree.breaks == outcomes[1].tree.breaks == outcomes[2].tree.breaks
        names = [[node.name for node in found.tree.nodes] for found in outcomes]
        assert sorted(names[0]) == sorted(names[1]) == sorted(names[2])
        differently += names[0] != names[1]
    assert differently > 5


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_an_honest_conversation_splits_only_where_the_template_rewrites(family: Family, thinking: bool) -> None:
    """As measured for known templates: user turn, call, result, answer, user turn, answer."""
    session = Session(family)
    hidden = {family.thinking: "bb"} if thinking else {}
    call: Message = CALL | hidden
    messages = [{"role": "system", "content": "s"}, USER]
    prompts = [session.turn(messages, call, tools=TOOLS)]
    prompts.append(session.turn([*messages, call, RESULT], ANSWER | hidden, tools=TOOLS))
    whole = [*messages, call, RESULT, ANSWER | hidden, MORE]
    prompts.append(session.turn(whole, ANSWER | hidden, tools=TOOLS))
    expected = {
        # The first turn's empty <think> is gone at once; thinking only at the next user turn.
        "qwen3": 1 if thinking else 2,
        "gpt-oss": 1,  # <|return|>; the turn with the call ends with <|call|> and is continued
        "mistral": 1,  # the system message moves to the last user turn
    }.get(family.name, 0)
    assert session.tree.breaks == Counter(template=expected) - Counter()
    assert len(session.rows()) == 1 + expected
    if not thinking and not expected:
        # What the engine processed is what the template renders: nothing was lost or added at a seam.
        rendered = family.seams.render(whole if family is DEEPSEEK else parsed(whole), TOOLS, prompt=True)
        assert text_of(family, prompts[-1].prompt_ids) == text_of(family, family.seams.ids(rendered))
    if thinking and not expected:
        assert text_of(family, prompts[-1].prompt_ids).count("bb") == 2  # in the ids, if the template writes it or not


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_quick_tokenisation_of_these_tests_is_that_of_the_tokenizer(family: Family) -> None:
    for text in (family.template, CORPUS, f"{EOS}\n{family.added[0]} é"):
        assert family.seams.ids(text) == Seams(family.tokenizer, {}).ids(text)


def test_a_seam_is_tokenised_as_the_template_writes_it_after_the_stop_token() -> None:
    session = Session()
    first = session.turn([USER], ANSWER)
    second = session.tree.request([USER, ANSWER, MORE])
    new = second.prompt_ids[len(first.prompt_ids) + len(session.tree.nodes[1].ids) :]
    assert text_of(session.family, new) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert session.tree.nodes[second.node].messages == [MORE] and session.tree.nodes[second.node].turn == 1


@pytest.mark.parametrize(
    "returned",
    [
        {"tool_calls": [add("call_1", b=2, a=1)], "role": "assistant"},  # other order of keys, no content
        CALL | {"content": "", "refusal": None, "reasoning_content": None, "annotations": []},
        CALL | {"tool_calls": [CALL["tool_calls"][0] | {"index": 0}]},
        CALL | {"tool_calls": [{"id": "call_1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        CALL | {"tool_calls": [{"function": {"arguments": '{ "a":1,\n"b" :2}', "name": "add"}, "id": "other"}]},
    ],
)
def test_an_equal_message_is_continued_with_the_recorded_ids(returned: Message) -> None:
    session = Session()
    first = session.turn([USER], CALL)
    second = session.tree.request([USER, returned, RESULT])
    sampled = session.tree.nodes[1].ids
    assert second.prompt_ids[: len(first.prompt_ids) + len(sampled)] == (*first.prompt_ids, *sampled)
    assert not session.tree.breaks


CHANGES: list[tuple[str, dict[str, Any], list[Message], str]] = [
    ("edited", {}, [USER, ANSWER | {"content": "ab"}, MORE], "messages[1] (assistant) cannot be continued (edited): its content"),
    ("edited", {}, [MORE, THOUGHT, MORE], "messages[1] (assistant) cannot be continued (edited): it was sampled after other"),
    ("thinking", {}, [USER, ANSWER, MORE], "(thinking): its reasoning_content is None and was 'bb' when it was sampled"),
    ("tools", {"tools": TOOLS}, [USER, THOUGHT, MORE], "(tools): it was sampled with other tools"),
    ("truncated", {"reason": "length"}, [USER, THOUGHT, MORE], "(truncated): its response was truncated"),
    ("seam", {"stop": EOS}, [USER, THOUGHT, MORE], "(seam): the chat template does not write <|endoftext|>, its last token"),
    ("seam", {"stop": "b"}, [USER, THOUGHT, MORE], "is not an added token"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "kwargs", "messages", "error"), CHANGES)
def test_anything_else_is_a_new_prompt_or_refused(
    reason: str, kwargs: dict[str, Any], messages: list[Message], error: str
) -> None:
    split, refusing = Session(), Session(on_break="refuse")
    for session in (split, refusing):
        session.turn([USER], THOUGHT, **kwargs)
    call = split.tree.request(messages)
    assert split.tree.breaks == {reason: 1}
    assert call.prompt_ids == tuple(split.family.seams.ids(split.family.seams.render(messages, prompt=True)))
    with pytest.raises(BrokenConversation, match="return sampled turns and all messages before them unchanged") as caught:
        refusing.tree.request(messages)
    assert error in str(caught.value) and "\n" not in str(caught.value)
    assert len(refusing.tree.nodes) == 2 and not refusing.tree.breaks
    split.say(call, ANSWER)
    assert [row.nodes for row in split.rows()] == [(0, 1), (2, 3)]
    split.tree.request(messages)
    assert split.tree.breaks == {reason: 1}  # once for a prompt, not for every response to it


def test_a_template_that_drops_thinking_is_refused_with_the_place() -> None:
    session = Session(QWEN3, on_break="refuse")
    session.turn([USER], THOUGHT)
    place = (
        r"messages\[1\] \(assistant\) cannot be continued \(template\): the chat template rendered '<think>.* now 'ba<\|im_end"
    )
    with pytest.raises(BrokenConversation, match=place):
        session.tree.request([USER, THOUGHT, MORE])


def test_a_stop_token_that_becomes_another_one_in_history_splits() -> None:
    session = Session(GPT_OSS)
    session.turn([USER], ANSWER)
    assert session.tree.nodes[session.tree.request([USER, ANSWER, MORE]).node].parent == -1
    assert session.tree.breaks == {"template": 1}


def test_other_continuations_and_other_prompts_are_forks_and_no_breaks() -> None:
    session = Session(on_break="refuse")
    session.turn([USER], ANSWER)
    session.turn([USER, ANSWER, MORE], ANSWER)
    session.turn([USER, ANSWER, MORE], ANSWER | {"content": "aa"})  # a retry
    session.turn([USER, ANSWER, USER], ANSWER)  # another continuation
    session.turn([MORE], ANSWER)  # another prompt, for example a summary
    shots = [ANSWER | {"role": "user"}, {"role": "assistant", "content": "written by hand"}, MORE]
    session.turn(shots, ANSWER)
    session.turn([*shots, ANSWER, USER], ANSWER)
    rows = session.rows()
    assert sorted(len(row.nodes) for row in rows) == [2, 4, 4, 4, 4]
    assert sum(row.nodes[:2] == (0, 1) for row in rows) == 3  # share the first turn


def test_an_edit_late_in_a_conversation_keeps_the_sampled_ids_before_it() -> None:
    session = Session()
    session.turn([USER], ANSWER)
    session.turn([USER, ANSWER, MORE], ANSWER)
    call = session.tree.request([USER, ANSWER, MORE, ANSWER | {"content": "edited"}, MORE])
    assert session.tree.breaks == {"edited": 1}
    assert session.tree.nodes[call.node].parent == 1  # the first turn's ids; the rest is new text
    assert len(session.tree.nodes[call.node].messages) == 3


def test_a_truncated_turn_late_in_a_conversation_keeps_the_sampled_ids_before_it() -> None:
    session = Session()
    session.turn([USER], ANSWER)
    session.turn([USER, ANSWER, MORE], THOUGHT, reason="length")
    call = session.tree.request([USER, ANSWER, MORE, THOUGHT, MORE])
    assert session.tree.breaks == {"truncated": 1} and session.tree.nodes[call.node].parent == 1


def test_a_new_prompt_is_rendered_from_the_messages_and_tools_as_they_came() -> None:
    session = Session(QWEN3)
    session.turn([USER], CALL, tools=TOOLS)
    other_order = CALL | {"tool_calls": [add("call_1", b=2, a=1)]}
    for returned, tools in ((other_order, TOOLS), (CALL, [dict(reversed(TOOLS[0].items()))])):
        messages = [USER, returned, RESULT, MORE]
        call = session.tree.request(messages, tools)
        assert session.tree.nodes[call.node].text == session.family.seams.render(parsed(messages), tools, prompt=True)
    assert session.tree.breaks == {"template": 2}


def test_a_shared_turn_is_trained_in_the_first_row_alone_and_context_in_the_others() -> None:
    session = Session()
    session.turn([USER], ANSWER)
    for text in ("aa", "bb", "ab"):
        session.turn([USER, ANSWER, MORE], {"role": "assistant", "content": text})
    rows = session.rows()
    assert [row.part for row in rows] == [0, 1, 2] and len(rows) == 3
    start, n = len(session.tree.nodes[0].ids), len(session.tree.nodes[1].ids)
    for i, row in enumerate(rows):
        assert row.response_mask[start : start + n].tolist() == [i == 0] * n
        assert row.weight_version[start : start + n].tolist() == [4 if i == 0 else -1] * n
        assert row.rollout_log_probs[start] == (-1.0 if i == 0 else 0.0)
    assert [row.input_ids.dtype, row.response_mask.dtype, row.rollout_log_probs.dtype, row.weight_version.dtype] == [
        np.int64,
        np.bool_,
        np.float32,
        np.int32,
    ]


def test_a_prompt_without_a_response_is_in_no_row() -> None:
    session = Session()
    assert session.rows() == []
    session.turn([USER], ANSWER)
    session.tree.request([USER, ANSWER, MORE])
    assert [row.nodes for row in session.rows()] == [(0, 1)]


def test_equal_calls_have_one_key_and_ordinals_and_other_sampling_another_key() -> None:
    tree = Session().tree
    calls = [tree.request([USER]), tree.request([copy.deepcopy(USER)]), tree.request([USER], sampling={"temperature": 0.5})]
    assert [(call.key == calls[0].key, call.ordinal) for call in calls] == [(True, 0), (True, 1), (False, 0)]
    assert len({call.prompt_ids for call in calls}) == 1 and len(tree.nodes) == 1
    other = Session().tree  # the identity of a call has nothing of what arrived before
    assert other.request([USER], sampling={"temperature": 0.5}).key == calls[2].key
    assert other.request([USER]).key == calls[0].key


def test_equal_turns_are_distinguished_by_the_ids_of_their_calls() -> None:
    session = Session()
    calls = [session.tree.request([USER]) for _ in range(2)]
    nodes = []
    for call, name, spaces in zip(calls, ("call_1", "call_2"), ("", " "), strict=True):
        message = CALL | {"tool_calls": [add(name, a=1)]}
        nodes.append(session.say(call, message, text=f"{spaces}<tool_call>add<|im_end|>"))
        result = RESULT | {"tool_call_id": name}
        for returned in (message, CALL | {"tool_calls": [add(name, a=1) | {"index": 0}]}):
            assert session.tree.nodes[session.tree.request([USER, returned, result]).node].parent in nodes[-1:]
    unknown = CALL | {"tool_calls": [add("other", a=1)]}
    assert session.tree.nodes[session.tree.request([USER, unknown, RESULT]).node].parent == nodes[0]


def test_messages_given_to_the_tree_may_change_afterwards() -> None:
    session, message, history = Session(), copy.deepcopy(CALL), [dict(USER)]
    call = session.tree.request(history, TOOLS)
    session.say(call, message)
    history[0]["content"] = message["tool_calls"][0]["function"]["name"] = "changed"
    session.tree.request([USER, CALL, RESULT], TOOLS)
    assert not session.tree.breaks and session.tree.nodes[0].messages == [USER]


def test_nodes_are_plain_data() -> None:
    session = Session()
    session.turn([USER], CALL, tools=TOOLS)
    for node in session.tree.nodes:
        values = {name: getattr(node, name) for name in type(node).__dataclass_fields__}
        assert json.loads(json.dumps(values)) == values


def test_a_template_that_concatenates_arguments_gets_them_as_text_and_others_as_values() -> None:
    for family in (DEEPSEEK, QWEN25, PLAIN):
        session = Session(family)
        session.turn([USER], CALL)
        call = session.tree.request([USER, CALL, RESULT])
        assert "1" in text_of(family, call.prompt_ids) and not session.tree.breaks
        assert '\\"' not in (session.tree.nodes[call.node].text or "")


def test_messages_that_the_template_rejects_are_refused() -> None:
    session = Session(LLAMA3)
    two: Message = CALL | {"tool_calls": [add("call_1", a=1), add("call_2", a=1)]}
    with pytest.raises(Refused, match="one call only"):
        session.tree.request([USER, two, RESULT])
    assert session.tree.nodes == []


def test_a_response_that_is_empty_uneven_or_repeated_is_refused() -> None:
    session = Session()
    call = session.turn([USER], ANSWER)
    for completion in (Completion(0, (), (), "stop", ()), Completion(0, (1,), (-1.0,), "stop", ())):
        with pytest.raises(ValueError, match=r"got \d tokens"):
            session.tree.record(session.tree.request([USER]), completion, ANSWER)
    with pytest.raises(ValueError, match=r"call 0 of key .* is already recorded"):
        session.say(call, ANSWER)
    assert len(session.tree.nodes) == 2
