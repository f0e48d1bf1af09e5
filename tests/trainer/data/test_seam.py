"""The seam between a sampled turn and the text that follows it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.tokenizers import merging_tokenizer
from trainer.data.seam import Break, Seams, appended, first_difference

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = "<|start|>user\nab<|end|>\n<|start|>assistant\n\n\nab ab \n ba<|end|>\n\n" * 20
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}, {"role": "user", "content": "b\n"}]
END = AddedToken("<|end|>", special=True)
RIGHT = AddedToken("<|end|>", special=True, rstrip=True)
START = AddedToken("<|start|>", special=True, lstrip=True)


def tokenizer(template: str = CHATML, *, end: AddedToken = END) -> PreTrainedTokenizerFast:
    return merging_tokenizer(CORPUS, "<eos>", end, START, chat_template=template)


def seams(template: str = CHATML, *, end: AddedToken = END, **kwargs: Any) -> Seams:
    return Seams(tokenizer(template, end=end), kwargs)


STOP = 1
TOKENIZERS = {name: seams(end=end) for name, end in (("plain", END), ("rstrip", RIGHT))}
PIECES = st.lists(st.sampled_from(["a", "b", " ", "\n", "<", "|", "end", "<|end|>", "<|start|>", "é", "assistant"])).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(left=PIECES, text=PIECES)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_ids_after_an_added_token_are_those_of_the_whole_text(name: str, left: str, text: str) -> None:
    seams = TOKENIZERS[name]
    assert seams.ids(left + "<|end|>") + seams.ids_after(STOP, text) == seams.ids(left + "<|end|>" + text)


def test_ids_of_the_text_alone_would_differ_after_a_token_that_takes_whitespace() -> None:
    assert TOKENIZERS["rstrip"].ids_after(STOP, "\nab") != TOKENIZERS["rstrip"].ids("\nab")


def test_a_conversation_that_only_grows_continues_after_the_stop_token() -> None:
    reader = seams()
    prompt, turn = reader.render(CHAT[:1], prompt=True), reader.render(CHAT[:2], prompt=False)
    end = reader.up_to_stop(prompt, turn, STOP)
    assert end == turn.removesuffix("\n")  # ChatML's newline is not sampled
    assert appended(end, reader.render(CHAT, prompt=True)) == "\n<|start|>user\nb\n<|end|>\n<|start|>assistant\n"


def test_the_last_stop_token_ends_a_turn_that_quotes_it() -> None:
    reader = seams()
    quoting = [CHAT[0], {"role": "assistant", "content": "a<|end|>\nb"}]
    turn = reader.render(quoting, prompt=False)
    assert reader.up_to_stop(reader.render(CHAT[:1], prompt=True), turn, STOP) == turn.removesuffix("\n")


def test_a_stop_token_that_the_model_quotes_and_the_template_does_not_write_ends_no_turn() -> None:
    reader = seams(CHATML.replace("<|end|>\n{% endfor", "\n{% endfor"))
    quoting = [CHAT[0], {"role": "assistant", "content": "a<|end|>b"}]
    found = reader.up_to_stop(reader.render(CHAT[:1], prompt=True), reader.render(quoting, prompt=False), STOP)
    assert isinstance(found, Break) and found.reason == "seam" and r"writes 'b\n' after <|end|>" in found.detail


def test_an_end_of_the_conversation_that_the_template_adds_is_not_part_of_the_turn() -> None:
    reader = seams(CHATML.replace("{% endif %}", "{% else %}<eos>{% endif %}"))
    turn = reader.render(CHAT[:2], prompt=False)
    assert turn.endswith("<|end|>\n<eos>")
    assert reader.up_to_stop(reader.render(CHAT[:1], prompt=True), turn, STOP) == turn.removesuffix("\n<eos>")


def test_a_rewritten_generation_prompt_is_a_break_of_the_template() -> None:
    reader = seams(CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"))
    found = reader.up_to_stop(reader.render(CHAT[:1], prompt=True), reader.render(CHAT[:2], prompt=False), STOP)
    assert isinstance(found, Break) and found.reason == "template"
    assert r"'<think>' after '" in found.detail and r"and now 'ba<|end|>\n'" in found.detail


@pytest.mark.parametrize(("stop", "detail"), [(0, "does not write <eos>"), (70, "70, is not an added token")])
def test_a_turn_that_does_not_end_with_a_token_of_the_template_has_no_seam(stop: int, detail: str) -> None:
    reader = seams()
    found = reader.up_to_stop(reader.render(CHAT[:1], prompt=True), reader.render(CHAT[:2], prompt=False), stop)
    assert isinstance(found, Break) and found.reason == "seam" and detail in found.detail


def test_a_token_that_the_text_after_it_changes_is_no_seam() -> None:
    reader = Seams(merging_tokenizer(CORPUS, "<eos>", AddedToken("<|end|>", single_word=True), "<|end|>b"), {})
    assert isinstance(reader.ids_after(STOP, "\nab"), list)
    for text in ("ab", "b"):  # a word's letter after the token; a longer added token
        found = reader.ids_after(STOP, text)
        assert isinstance(found, Break) and found.reason == "seam" and "is not tokenised as one token" in found.detail


def test_the_first_difference_is_the_end_of_the_common_beginning() -> None:
    assert first_difference("ab", "abc") is None and first_difference("", "") is None
    assert first_difference("abc", "ab") == 2 and first_difference("xb", "ab") == 0
    detail = "the chat template rendered 'c' after 'ab' before, and now nothing"
    assert appended("abc", "ab") == Break("template", detail)


def test_rendering_passes_tools_and_the_template_arguments() -> None:
    reader = seams("{{ tools | length if tools else 0 }}{{ day }}{{ add_generation_prompt }}", day="Mo")
    assert reader.render(CHAT, prompt=False) == "0MoFalse"
    assert reader.render(CHAT, [{"type": "function", "function": {"name": "f"}}], prompt=True) == "1MoTrue"


def test_a_tokenizer_that_marks_the_start_of_a_text_does_not_mark_the_text_after_a_seam() -> None:
    vocabulary = ["<eos>", "<|end|>", "▁", "a", "b", "▁a"]
    model = Tokenizer(BPE({token: i for i, token in enumerate(vocabulary)}, [("▁", "a")]))
    model.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    model.add_special_tokens(["<eos>", "<|end|>"])
    reader = Seams(PreTrainedTokenizerFast(tokenizer_object=model, chat_template=CHATML), {})
    assert reader.ids("ab") == [5, 4] and reader.ids("ba<|end|>ab") == [2, 4, 3, STOP, 3, 4]
    assert reader.ids_after(STOP, "ab") == [3, 4] and reader.ids_after(STOP, " ab") == [5, 4]
