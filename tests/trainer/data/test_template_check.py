"""Findings about chat templates, compared with renderings of random conversations."""

import random
from typing import Any

import pytest

from tests.trainer.data.templates import ENDS, QWEN25, TEMPLATES, TOOLS, conversation, family_tokenizer
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.template_check import HARMLESS, OF_TEXT, PROBES, Cause, TemplateReport, check_template

KINDS: dict[str, dict[str, Any]] = {
    "text": {"system": 0.0},
    "system": {"system": 1.0},
    "thinking in the content": {"system": 0.0, "inline": 1.0},
    "thinking": {"system": 0.0, "thinking": 1.0},
    "tools": {"system": 0.0, "calls": 2},
    "tools and thinking": {"system": 0.0, "thinking": 1.0, "calls": 2},
}


def share_append_only(family: str, n: int, **kind: Any) -> float:
    """Share of random conversations in which every turn continues its prompt, and every next prompt continues the turn."""
    tokenizer, rng = family_tokenizer(family), random.Random(3)
    tools = TOOLS if "calls" in kind else None
    good = 0
    for _ in range(n):
        chat, seen, is_good = conversation(rng, **kind), "", True
        for i, message in enumerate(chat):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(chat[:i], tools, tokenize=False, add_generation_prompt=True)
                text = tokenizer.apply_chat_template(chat[: i + 1], tools, tokenize=False)
                is_good &= prompt.startswith(seen) and text.startswith(prompt)
                end = "<|call|>" if family == "gpt-oss" and "tool_calls" in message else ENDS[family]
                seen = text[: text.rindex(end)] + end
        good += is_good
    return good / n


@pytest.mark.parametrize("family", TEMPLATES)
def test_verdict_is_that_of_random_conversations(family: str) -> None:
    report = check_template(family_tokenizer(family), {})
    found = {kind: share_append_only(family, 20, **settings) for kind, settings in KINDS.items()}
    assert {kind: share == 1.0 for kind, share in found.items()} == {kind: report.append_only(kind) for kind in KINDS}, found


# Measured with the vendors' templates on 200 conversations, without and with thinking.
@pytest.mark.parametrize(
    ("family", "shares"),
    {"qwen2.5": (1.0, 1.0), "llama3": (1.0, 1.0), "qwen3": (0.10, 0.34), "qwen3.5": (0.35, 0.34), "glm": (1.0, 0.34)}.items(),
)
def test_templates_of_these_tests_break_as_often_as_those_of_the_vendors(family: str, shares: tuple[float, float]) -> None:
    found = [share_append_only(family, 60, calls=2, thinking=thinking) for thinking in (0.0, 1.0)]
    assert found == pytest.approx(shares, abs=0.12) and [share == 1.0 for share in found] == [share == 1.0 for share in shares]


def breaks(report: TemplateReport) -> set[tuple[Cause, str]]:
    """(cause, role of the message that follows) of what is not append-only."""
    return {(found.cause, found.follows) for found in report.findings if found.cause not in HARMLESS}


EMPTY, DROPS = Cause.EMPTY_THINKING, Cause.DROPS_THINKING
BREAKS = {
    "qwen2.5": set[tuple[Cause, str]](),
    "qwen3": {(EMPTY, "user"), (EMPTY, "tool"), (DROPS, "user")},
    "qwen3.5": {(EMPTY, "user"), (DROPS, "user")},
    "glm": {(DROPS, "user")},
    "llama3": set[tuple[Cause, str]](),
    "phi3": set[tuple[Cause, str]](),
    "gpt-oss": {(Cause.CHANGES_END, "user"), (DROPS, "")},
    "deepseek-v3": set[tuple[Cause, str]](),
    "deepseek-r1": {(Cause.OPENS, "")},
    "mistral": {(Cause.MOVES, "user")},
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_causes_and_places_of_the_families(family: str) -> None:
    report = check_template(family_tokenizer(family), {})
    assert breaks(report) == BREAKS[family]
    note = report.note("So be it")
    assert (note is None) == (not BREAKS[family])
    if note is not None:
        assert note.startswith("the chat template is not append-only: it ") and note.endswith(". So be it") and "\n" not in note
        assert all(note.count(cause) == sum(other == cause for other, _ in BREAKS[family]) for cause, _ in BREAKS[family])


HARMLESS_FINDINGS = {
    "qwen2.5": {Cause.OMITS_THINKING: "thinking"},
    "qwen3": {},
    "llama3": {Cause.TRIMS: "white space", Cause.OMITS_THINKING: "thinking"},
    "phi3": {Cause.CLOSES: "text", Cause.OMITS: "tools", Cause.OMITS_THINKING: "thinking"},
}


@pytest.mark.parametrize("family", HARMLESS_FINDINGS)
def test_findings_that_change_no_text_of_a_prompt(family: str) -> None:
    """With the first probe that shows them."""
    first: dict[Cause, str] = {}
    for found in check_template(family_tokenizer(family), {}).findings:
        if found.cause in HARMLESS:
            first.setdefault(found.cause, found.probe)
    assert first == HARMLESS_FINDINGS[family]


def test_note_names_each_cause_once_with_an_example() -> None:
    note = check_template(family_tokenizer("qwen3"), {}, OF_TEXT).note("Rows are split")
    assert note == (
        "the chat template is not append-only: it writes an empty thinking block in the last turn only (where a user message "
        r"follows, '<think>\n\n</think>\n\nxansw' becomes 'xanswer1<|im_end|>\n<|im_'); it drops the thinking of earlier turns "
        r"(where a user message follows, '<think>\nxthought1\n</thin' becomes 'xanswer1<|im_end|>\n<|im_'). Rows are split"
    )


def test_arguments_of_the_template_and_probes_are_used() -> None:
    tokenizer = family_tokenizer("qwen3")
    assert breaks(check_template(tokenizer, {}, ["text"])) == {(EMPTY, "user")}
    # With an empty block in the prompt, a turn that has thoughts does not continue it.
    assert (Cause.OPENS, "") in breaks(check_template(tokenizer, {"enable_thinking": False}, ["thinking"]))
    with pytest.raises(ValueError, match="has no chat template"):
        check_template(byte_tokenizer(chat_template=None), {})


PLAIN = "{% for m in messages %}<{{ m.role }}>CONTENT<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
OTHERS = {
    "{{ m.content if loop.last or m.role != 'assistant' else m.content | trim }}": (Cause.CHANGES_SPACE, "white space"),
    "{{ m.content if loop.last or m.role != 'assistant' else m.content | upper }}": (Cause.REWRITES, "text"),
    "{{ raise_exception('no system prompt') if m.role == 'system' }}{{ m.content }}": (Cause.REJECTS, "system"),
    "{{ raise_exception('no tools') if m.role == 'tool' }}{{ m.content }}": (Cause.REJECTS, "tools"),
    "{{ m.content if m.role != 'system' }}": (Cause.OMITS, "system"),
}


@pytest.mark.parametrize("content", OTHERS)
def test_other_causes(content: str) -> None:
    report = check_template(byte_tokenizer(chat_template=PLAIN.replace("CONTENT", content)), {})
    assert {(found.cause, found.probe) for found in report.findings} >= {OTHERS[content]}
    first = next(found for found in report.findings if found.cause is OTHERS[content][0])
    assert first.probe == OTHERS[content][1] and (first.cause is not Cause.REJECTS or first.detail.startswith("no "))


def test_a_template_that_only_appends_has_no_finding_but_what_it_lacks() -> None:
    report = check_template(family_tokenizer("qwen2.5"), {}, [name for name in PROBES if "thinking" not in name])
    assert report == TemplateReport(()) and "reasoning" not in QWEN25


def test_white_space_after_the_last_turn_is_no_finding() -> None:
    template = PLAIN.replace("CONTENT<eos>", "{{ m.content }}{{ '\\n' if loop.last and m.role == 'assistant' }}")
    assert check_template(byte_tokenizer(chat_template=template), {}, ["text", "system"]).findings == ()
