"""Text, stop strings and ids of a response do not depend on how its tokens arrive."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from data_preprocess.tiny_model import character_tokenizer
from trainer.agents.formats import call_format
from trainer.serving.model_engine import Update
from trainer.serving.response_reader import ResponseReader
from trainer.serving.turn_splitter import TurnSplitter

TOKENIZER = character_tokenizer(None, with_tools=True)
EOS = TOKENIZER.convert_tokens_to_ids("<eos>")
# Few characters, so that stop strings are found; 250 is no character by itself.
LETTERS = [*TOKENIZER("abé<th", add_special_tokens=False)["input_ids"], 250]
IDS = st.lists(st.sampled_from(LETTERS), max_size=30)


def reader(stop: list[str], *, tools: bool) -> ResponseReader:
    splitter = TurnSplitter("hermes", call_format("hermes"), [], in_thinking=False) if tools else None
    return ResponseReader(
        0,
        [1],
        TOKENIZER.backend_tokenizer,
        splitter,
        stop=stop,
        token_text=lambda token: f"<{token}>",
        with_special=tools,
        turn=0,
    )


@given(
    IDS,
    st.integers(1, 6),
    st.lists(st.sampled_from(["ab", "é", "bb", "a", "bé", "<th"]), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_a_response_is_read_the_same_in_parts_of_any_size(
    ids: list[int], size: int, stop: list[str], tools: bool, ends: bool
) -> None:
    sampled = [*ids, EOS] if ends or not ids else ids
    reason = "stop" if ends or not ids else "length"
    whole, parts = reader(stop, tools=tools), reader(stop, tools=tools)
    whole.add(Update(sampled, [float(i) for i in range(len(sampled))], reason))
    deltas = []
    for first in range(0, len(sampled), size):
        part = sampled[first : first + size]
        log_probs = [float(first + i) for i in range(len(part))]
        deltas.append(parts.add(Update(part, log_probs, reason if first + size >= len(sampled) else None)))
        if parts.completion is not None:
            break
    found = parts.completion
    assert found is not None and found == whole.completion
    assert "".join(delta.text for delta in deltas) == found.text
    assert "".join(delta.thinking for delta in deltas) == found.thinking
    assert [token for delta in deltas for token in delta.token_ids] == found.token_ids == sampled[: len(found.token_ids)]
    assert found.log_probs == [float(i) for i in range(len(found.token_ids))]
    assert found.tokens == [f"<{token}>" for token in found.token_ids]
    if not tools:
        assert not any(text in found.text for text in stop)
        assert (found.stop_sequence is not None) == any(text in _text(sampled) for text in stop)


def _text(ids: list[int]) -> str:
    """What a stream of these ids decodes to: bytes that are no character yet are left out at the end."""
    plain = ResponseReader(0, [1], TOKENIZER.backend_tokenizer, None, stop=(), token_text=None, with_special=False, turn=0)
    plain.add(Update(ids, [0.0] * len(ids), "stop" if ids[-1] == EOS else "length"))
    assert plain.completion is not None
    return plain.completion.text


def test_a_run_of_bytes_that_is_no_text_becomes_replacement_characters() -> None:
    """ByteFallback (Llama 2, Gemma) decodes a run as a whole; a broken one changes what was given out before."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "▁a": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for ids, text in (
        ([256, 0x0A, 0xE5, 256], "a\n\ufffda"),
        ([256, 0x0A, 0xE5, 0x0A, 256, 0x0A, 0xFF, 256], "a\n\ufffd\na\n\ufffda"),
        ([256, 0x0A, 0xE5, 0xA5, 0xBD, 256], "a\n好a"),
        ([0x0A, 0xE5], "\n"),
        ([256, 0xC3, 0xA9, 0xFF, 256, 256], "aé\ufffdaa"),
        ([256, 0x0A, 0xE5, 257], "a\n\ufffd a"),  # a first space would be taken off
    ):
        one = ResponseReader(0, [1], tokenizer, None, stop=(), token_text=None, with_special=False, turn=0)
        for token in ids:
            one.add(Update([token], [0.0], None))
        one.add(Update([], [], "length"))
        assert one.completion is not None and one.completion.text == text


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    ids = TOKENIZER("xabab!y", add_special_tokens=False)["input_ids"]
    one = reader(["abc", "b!"], tools=False)
    given = [one.add(Update([token], [0.0], None)).text for token in ids[:-1]]
    assert given == ["x", "", "", "ab", "", "a"] and one.completion is not None
    assert (one.completion.text, one.completion.stop_sequence, one.completion.finish_reason) == ("xaba", "b!", "stop")
