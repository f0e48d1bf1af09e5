"""Call formats: what templates render is parsed back; nothing else is a call, whatever the text is."""

import json
import keyword
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.agents.families import LLAMA3, QWEN25, Family
from trainer.agents.formats import FORMATS, AssistantTurn, MalformedCall, ToolCall, call_format, opens_thinking, parse_turn
from trainer.data.encoding import parsed

Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]

JINJA = jinja2.Environment()
JINJA.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
# The loops over calls in the templates of Qwen3-Coder, and of models that write Python.
XML = JINJA.from_string(
    "{% for call in calls %}{% if not loop.first %}{{ '\n' }}{% endif %}<tool_call>{{ '\n' }}<function={{ call[0] }}>{{ '\n' }}"
    "{% for key, value in call[1] | items %}<parameter={{ key }}>{{ '\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>{{ '\n' }}</tool_call>{% endfor %}"
)


def message(calls: Calls) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}


def by_family(family: Family) -> Callable[[Calls], str]:
    """The assistant's turn in the family's template, without its stop token."""
    template = JINJA.from_string(family.template)

    def render(calls: Calls) -> str:
        text = template.render(messages=[message(calls)])
        return (
            text[text.index("assistant") + len("assistant") :]
            .lstrip("\n")
            .removeprefix("<|end_header_id|>\n\n")
            .rpartition("<|")[0]
        )

    return render


def pythonic(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(one(*call) for call in calls)}]"


RENDER: dict[str, Callable[[Calls], str]] = {
    "hermes": by_family(QWEN25),
    "qwen3_coder": lambda calls: XML.render(calls=calls),
    "llama3_json": by_family(LLAMA3),
    "pythonic": pythonic,
}

MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=",
    "</function>",
    "</parameter>",
    '{"name": "f"',
    ";",
    "]",
)
words = st.one_of(st.text(max_size=8), st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=4).map("".join))
numbers = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False))
scalars = st.one_of(words, numbers, st.booleans(), st.none())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
# As the tools' schemas have them: XML has no types of its own.
TYPED = {
    "s": ({"type": "string"}, words),
    "i": ({"type": "integer"}, st.integers(-(10**20), 10**20)),
    "x": ({"type": "number"}, numbers),
    "b": ({"type": "boolean"}, st.booleans()),
    "n": ({"type": "integer", "nullable": True}, st.one_of(st.none(), st.integers())),
    "l": ({"type": "array"}, st.lists(values, max_size=3)),
    "d": ({"type": "object"}, st.dictionaries(words, values, max_size=3)),
    "u": ({"anyOf": [{"type": "array"}, {"type": "number"}]}, st.one_of(st.lists(values, max_size=2), st.integers())),
    "e": ({"enum": [1, "one", None]}, st.sampled_from([1, "one", None])),
}
TOOL = {"type": "function", "function": {"name": "typed", "parameters": {"properties": {k: s for k, (s, _) in TYPED.items()}}}}


def xml_can_hold(arguments: Arguments) -> bool:
    return not any(mark in text for text in map(str, arguments.values()) for mark in ("<parameter=", "</parameter>"))


def calls_in(format: str) -> st.SearchStrategy[Calls]:
    if format == "qwen3_coder":
        typed = st.fixed_dictionaries({}, optional={name: strategy for name, (_, strategy) in TYPED.items()}).filter(xml_can_hold)
        plain = st.dictionaries(names, words, max_size=3).filter(xml_can_hold)
        return st.lists(st.tuples(st.just("typed"), typed) | st.tuples(names, plain), min_size=1, max_size=3)
    call = st.tuples(names, st.dictionaries(names if format == "pythonic" else words, values, max_size=3))
    return st.lists(call, min_size=1, max_size=1 if format == "llama3_json" else 3)


def read(format: str, text: str, **kwargs: Any) -> AssistantTurn:
    return parse_turn(call_format(format), text, [TOOL], **kwargs)


def good(turn: AssistantTurn) -> Calls:
    return [(call.name, call.arguments) for call in turn.calls if isinstance(call, ToolCall)]


def kinds(format: str, text: str) -> list[str]:
    return [call.kind for call in read(format, text).calls if isinstance(call, MalformedCall)]


def same(found: Calls, made: Calls) -> bool:
    """Equal also in types: 1 is not 1.0 and not True."""
    return repr(found) == repr(made)


few = settings(max_examples=25, deadline=None, derandomize=True)
formats = pytest.mark.parametrize("format", RENDER)


@formats
@few
@given(data=st.data())
def test_rendered_calls_are_parsed_back(format: str, data: st.DataObject) -> None:
    calls = data.draw(calls_in(format))
    turn = read(format, RENDER[format](calls), turn=3)
    assert same(good(turn), calls) and not turn.malformed()
    assert [call.id for call in turn.calls] == [f"call_3_{i}" for i in range(len(calls))]
    assert (turn.before + turn.after).strip() == ""
    functions = [call["function"] for call in parsed([turn.message()])[0]["tool_calls"]]
    assert same([(function["name"], function["arguments"]) for function in functions], calls)


@few
@given(calls=calls_in("hermes"), seed=st.integers(0, 99), before=st.text(max_size=5), after=st.text(max_size=5))
def test_hermes_calls_in_any_spacing_and_text_are_parsed_back(calls: Calls, seed: int, before: str, after: str) -> None:
    written = QWEN25.write(message(calls), Random(seed)).removesuffix("<|im_end|>")
    turn = read("qwen3", f"<think>\n{before}<tool_call>\n</think>{before}{written}{after}")
    assert same(good(turn), calls)
    assert (turn.thinking, turn.before, turn.after.strip()) == (f"\n{before}<tool_call>\n", before, after.strip())


def test_llama_calls_may_be_several_and_after_the_python_tag() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "arguments": {}}'
    assert good(read("llama3_json", text)) == [("f", {"a": ";"}), ("g", {})]


@formats
@few
@given(data=st.data())
def test_truncated_text_has_no_call_that_was_not_complete(format: str, data: st.DataObject) -> None:
    calls = data.draw(calls_in(format))
    text = RENDER[format](calls)
    found = good(read(format, text[: data.draw(st.integers(0, len(text) - 1))]))
    assert same(found, calls[: len(found)]) and len(found) < len(calls)


def mutated(text: str, rng: Random) -> str:
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(text) + 1)
        j = rng.choice([i, i + 1, i + rng.randint(0, 12)])
        k = rng.randrange(len(text) + 1)
        text = text[:i] + rng.choice(["", "", rng.choice(MARKS), text[k : k + rng.randint(1, 40)]]) + text[j:]
    return text


def is_there(format: str, text: str, name: str, arguments: Arguments) -> bool:
    """Whether a call is in the text, by other means than the parser's."""
    if format == "pythonic":
        found: Calls = []
        namespace = Names(found)
        eval(text.strip(), {"__builtins__": {}}, namespace)
        return repr((name, arguments)) in map(repr, found)
    if format == "llama3_json":
        call = json.loads(text.strip())
        return (call["name"], call.get("parameters", call.get("arguments"))) == (name, arguments)
    starts = [i + len("<tool_call>") for i in range(len(text)) if text.startswith("<tool_call>", i)]
    ends = [i for i in range(len(text)) if text.startswith("</tool_call>", i)]
    spans = [text[i:j].strip() for i in starts for j in ends if i <= j]
    if format == "hermes":
        for span in spans:
            try:
                value = json.loads(span)
            except ValueError:
                continue
            if isinstance(value, dict) and repr((value.get("name"), value.get("arguments"))) == repr((name, arguments)):
                return True
        return False
    for span in spans:
        # Every character of a call is a tag or a value: rendering it again gives the span, apart from whitespace between tags.
        again = XML.render(calls=[(name, arguments)]).removeprefix("<tool_call>").removesuffix("</tool_call>")
        if "".join(again.split()) == "".join(span.split()):
            return True
    return False


class Names(dict[str, Any]):
    """Namespace in which every name is a function that records its calls."""

    def __init__(self, found: Calls) -> None:
        super().__init__(true=True, false=False, null=None)
        self.found = found

    def __missing__(self, name: str) -> Any:
        def called(**arguments: Any) -> None:
            self.found.append((name, json.loads(json.dumps(arguments))))

        return called


@formats
@few
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_mutated_text_never_raises_and_has_no_call_that_is_not_there(format: str, data: st.DataObject, seed: int) -> None:
    calls = data.draw(calls_in(format))
    text = mutated(RENDER[format](calls), Random(seed))
    turn = parse_turn(call_format(format), text)
    for name, arguments in good(turn):
        assert is_there(format, text, name, arguments)
    assert len(turn.calls) - len(good(turn)) <= 1
    json.dumps(turn.message(), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("format", FORMATS)
@few
@given(text=st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=4)), max_size=12).map("".join))
def test_any_text_is_parsed_without_an_error_and_none_of_it_is_lost(format: str, text: str) -> None:
    turn = read(format, text)
    if "<think>" not in text and not good(turn):
        assert (turn.before + turn.after) == text


@formats
@few
@given(data=st.data())
def test_calls_within_thinking_are_not_calls(format: str, data: st.DataObject) -> None:
    text = RENDER[format](data.draw(calls_in(format))).replace("</think>", "")
    for thinking in (f"<think>{text}</think>", f"<think>{text}"):
        turn = read(format, thinking)
        assert (turn.calls, turn.thinking, turn.before) == ((), text, "")
    opened = read(format, f"{text}</think>\n\nyes", in_thinking=True)
    assert (opened.calls, opened.thinking, opened.before.strip()) == ((), text, "yes")
    assert read(format, text, in_thinking=True).calls == ()


def test_a_prompt_that_ends_in_a_thinking_block_opens_it() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("format", "text", "kind"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "json"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "json"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "json"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "json"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {"[" * 100_000}', "json"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', "json"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "fields"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "fields"),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "fields"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "markup"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} so</tool_call>', "markup"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>", "markup"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></function>", "markup"),
        ("qwen3_coder", "<tool_call><function=f></tool_call>", "markup"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>", "markup"),
        ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 2 + "</function></tool_call>", "fields"),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}', "json"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "fields"),
        ("llama3_json", '{"name": "f", "parameters": {}} calls f', "markup"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>', "json"),
        ("pythonic", "[f(a=1)", "python"),
        ("pythonic", "[f(a=1, a=2)]", "python"),
        ("pythonic", "[f(a={'b': 1, 'b': 2})]", "python"),
        ("pythonic", "[f(a=1)] # a call", "python"),
        ("pythonic", f"[f(a={'[' * 150}{']' * 150})]", "python"),
        ("pythonic", "[f(1)]", "python"),
        ("pythonic", "[f(**a)]", "python"),
        ("pythonic", "[f(a=open)]", "python"),
        ("pythonic", "[f(a=1j)]", "python"),
        ("pythonic", "[f(a=b'')]", "python"),
        ("pythonic", "[f(a=1e999)]", "python"),
        ("pythonic", "[f()(a=1)]", "python"),
        ("pythonic", "[f(a=1)][0]", "python"),
        ("pythonic", f"[f(a={'-' * 50_000}1)]", "python"),
        ("pythonic", f"[f(a={'[' * 5_000}1)]", "python"),
        ("pythonic", "[f(a='\0')]", "python"),
    ],
)  # fmt: skip
def test_malformed_calls_are_of_their_kind_and_stay_in_the_content(format: str, text: str, kind: str) -> None:
    turn = read(format, text)
    assert kinds(format, text) == [kind] and turn.malformed() == {kind: 1} and not good(turn)
    assert turn.message() == {"role": "assistant", "content": text}
    (call,) = turn.calls
    assert isinstance(call, MalformedCall) and "\n" not in call.error and len(call.error) < 300


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("hermes", "</tool_call>"),
        ("qwen3_coder", "<function=f></function>"),
        ("llama3_json", '{"answer": 3}'),
        ("llama3_json", '{"name": "Ada"}'),
        ("llama3_json", 'f: {"name": "f", "parameters": {}}'),
        ("llama3_json", "{x | x > 0}"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "f(a=1)"),
        ("pythonic", "[see (a)]"),
    ],
)
def test_text_that_is_no_call_is_content(format: str, text: str) -> None:
    assert read(format, text) == AssistantTurn("", text, "", ())


def test_calls_after_a_malformed_one_are_not_read_and_those_before_are() -> None:
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = read("hermes", f"{one}<tool_call>an example: {one}</tool_call>{one}")
    assert good(turn) == [("f", {})] and turn.malformed() == {"json": 1}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "1", "1"),
        ("s", "\nx\n", "\nx\n"),
        ("s", "null", "null"),
        ("i", " 7 ", 7),
        ("i", "7.5", "7.5"),
        ("i", "seven", "seven"),
        ("x", "1e3", 1000.0),
        ("x", "nan", "nan"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "1", "1"),
        ("n", "None", None),
        ("n", "null", None),
        ("i", "null", "null"),
        ("l", "[1, [2]]", [1, [2]]),
        ("l", "1", "1"),
        ("d", '{"a": null}', {"a": None}),
        ("d", "{'a': 1}", "{'a': 1}"),
        ("u", "2", 2),
        ("e", "1", 1),
        ("e", "one", "one"),
        ("e", "None", None),
        ("other", "5", "5"),
    ],
)
def test_xml_values_have_the_types_of_the_schema_and_are_text_otherwise(key: str, text: str, value: Any) -> None:
    found = good(read("qwen3_coder", XML.render(calls=[("typed", {key: text})])))
    assert repr(found) == repr([("typed", {key: value})])


@pytest.mark.parametrize("parameters", [None, [], {"properties": None}, {"properties": []}, {"properties": "x"}])
def test_xml_values_are_text_if_the_tool_has_no_schema(parameters: Any) -> None:
    """Some serialisers write an object without fields as a list."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert good(parse_turn(call_format("qwen3_coder"), XML.render(calls=[("f", {"a": "3"})]), tools)) == [("f", {"a": "3"})]


def test_xml_values_have_the_types_of_definitions_that_the_tool_shares() -> None:
    number = {"$ref": "#/$defs/number"}
    parameters = {"type": "object", "properties": {"a": number, "b": True}, "$defs": {"number": {"type": "integer"}}}
    text = XML.render(calls=[("f", {"a": "3", "b": "3"})])
    turn = parse_turn(
        call_format("qwen3_coder"), text, [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    )
    assert good(turn) == [("f", {"a": 3, "b": "3"})]


OWN = '''
def shout(text, tools):
    """CALL name {json}, one per line."""
    import json
    lines = text.splitlines()
    calls = [line.split(" ", 2) for line in lines if line.startswith("CALL")]
    if any(len(call) < 3 for call in calls):
        raise ValueError("CALL needs a name and JSON")
    return "\\n".join(line for line in lines if not line.startswith("CALL")), [
        {"name": name, "arguments": json.loads(arguments)} for _, name, arguments in calls]

def leave(text, tools):
    raise SystemExit(3)

def wrong(text, tools):
    return text, [{"name": 3}]

def nothing(text, tools):
    return None

def no_text(text, tools):
    return None, [{"name": "f", "arguments": {}}]

class Unprintable(ValueError):
    def __str__(self):
        raise TypeError

def unprintable(text, tools):
    raise Unprintable

def lines(text, tools):
    raise ValueError("a\\nb")
'''


@pytest.mark.parametrize(
    "value", ["a</parameter>b", "</parameter>\n", "</function>\n</tool_call>", "<tool_call>", "</parameter>\n</function>"]
)
def test_xml_values_may_have_tags_in_them(value: str) -> None:
    calls: Calls = [("f", {"a": value, "b": value}), ("g", {})]
    assert good(read("qwen3_coder", XML.render(calls=calls))) == calls


def test_a_users_parser_is_loaded_from_a_file_and_its_errors_are_malformed_calls(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    turn = read(f"{file}:shout", '<think>CALL</think>hi\nCALL f {"a": 1}')
    assert (turn.thinking, turn.before, good(turn)) == ("CALL", "hi", [("f", {"a": 1})])
    assert read(f"{file}:shout", "CALL f").calls == (MalformedCall("call_0_0", "parser", "CALL needs a name and JSON"),)
    for name in ("leave", "wrong", "nothing", "unprintable"):
        assert kinds(f"{file}:{name}", "text") == ["parser"]
    assert read(f"{file}:lines", "").calls == (MalformedCall("call_0_0", "parser", "a b"),)
    without = read(f"{file}:no_text", "x")
    assert (without.before, good(without)) == ("", [("f", {})])
    with pytest.raises(ValueError, match="has no function absent"):
        call_format(f"{file}:absent")
    with pytest.raises(ValueError, match=r"multi_turn\.format=herms: no such format; use hermes, "):
        call_format("herms")


def test_a_tag_in_a_sentence_begins_no_thinking() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = read("hermes", f"I never use <think> tags.\n{call}")
    assert (turn.thinking, turn.before, good(turn)) == ("", "I never use <think> tags.\n", [("f", {})])
    turn = read("hermes", f"Wait.\n{call} <think>Perhaps {call}")
    assert (turn.thinking, good(turn)) == (f"Perhaps {call}", [("f", {})])


def test_ids_and_texts_are_in_the_order_of_the_response() -> None:
    calls = [f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(3)]
    turn = read("hermes", f"a{calls[0]}b{calls[1]}c{calls[2]}d", turn=1)
    assert [(call.id, call.name) for call in turn.calls if isinstance(call, ToolCall)] == [
        ("call_1_0", "f0"), ("call_1_1", "f1"), ("call_1_2", "f2")]  # fmt: skip
    assert (turn.before, turn.after) == ("a", "bcd")


HARMONY = "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant"
HARMONY += "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "thinking", "before", "calls"),
    [
        (f'{HARMONY}{{"a": 1, "b": [2]}}', "Add them.", "", [("add", {"a": 1, "b": [2]})]),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [("add", {"a": 1})]),
        (
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
            "Easy.",
            "It is 3.",
            [],
        ),
        ("No message.", "", "No message.", []),
    ],
)
def test_messages_of_gpt_oss_are_thinking_calls_and_text(text: str, thinking: str, before: str, calls: list[Any]) -> None:
    turn = parse_turn(call_format("gpt-oss"), text)
    assert (turn.thinking, turn.before) == (thinking, before)
    assert [(call.name, call.arguments) for call in turn.calls if isinstance(call, ToolCall)] == calls


@pytest.mark.parametrize(("body", "kind"), [('{"a": 1', "json"), ("[1]", "fields"), ('{"a": 1} and', "fields")])
def test_a_call_of_gpt_oss_that_is_no_object_is_malformed_and_stays_in_the_content(body: str, kind: str) -> None:
    turn = parse_turn(call_format("gpt-oss"), HARMONY + body)
    (found,) = turn.calls
    assert isinstance(found, MalformedCall) and found.kind == kind and body in turn.before and turn.thinking == "Add them."
