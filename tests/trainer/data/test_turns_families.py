"""Rows of random conversations under the templates of well-known families, compared with direct renderings."""

import random
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.templates import ENDS, TEMPLATES, conversation, family_tokenizer
from trainer.data.turns import TurnEncoder, Turns

ACCEPTED = [family for family in TEMPLATES if family != "deepseek-r1"]
N = 24  # conversations per family


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def spans(row: Turns) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(row.trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [(int(start), int(end)) for start, end in edges]


def renderings(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, Any]], **kwargs: Any) -> list[tuple[str, str]]:
    """(prompt, prompt and turn) of each assistant turn."""
    return [
        (
            tokenizer.apply_chat_template(chat[:i], tokenize=False, add_generation_prompt=True, **kwargs),
            tokenizer.apply_chat_template(chat[: i + 1], tokenize=False, **kwargs),
        )
        for i, message in enumerate(chat)
        if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["", "no thinking"])
@pytest.mark.parametrize("family", ACCEPTED)
def test_each_turn_is_trained_once_after_the_prompt_of_generation(family: str, kwargs: dict[str, Any]) -> None:
    tokenizer, end_token = family_tokenizer(family), ENDS[family]
    encoder, rng, n_across = TurnEncoder(tokenizer, kwargs), random.Random(7), 0
    for number in range(N):
        # With the thinking switched off, a turn that has some would not continue its prompt.
        chat = conversation(rng, inline=0.0 if kwargs else 0.5)
        chat = chat if number % 4 else chat[:-1]
        expected = renderings(tokenizer, chat, **kwargs)
        rows = encoder.chat("row 0", chat)
        found = [(row, span) for row in rows for span in spans(row)]
        assert len(found) == len(expected) == sum(row.n_turns for row in rows)
        answers = [text.removeprefix(prompt).rpartition(end_token)[0] + end_token for prompt, text in expected]
        across = False  # whether a token spans the end of a prompt
        for (row, (start, end)), (prompt, text), answer in zip(found, expected, answers, strict=True):
            assert row.ids[:start].tolist() == ids(tokenizer, prompt)
            whole, is_end = ids(tokenizer, text), tokenizer.decode(row.ids) == text
            assert is_end or row is rows[-1] or start < spans(row)[-1][0]
            # What Phi-3 writes after the end token is trained where a row ends, as in conversations of one turn.
            assert tokenizer.decode(row.ids[start:end]) == answer + ("\n<|endoftext|>" if family == "phi3" and is_end else "")
            if whole[:start] != ids(tokenizer, prompt):
                across, whole = True, ids(tokenizer, prompt) + ids(tokenizer, text.removeprefix(prompt))
            if is_end:
                assert row.ids.tolist() == whole
        ends = [prompt + answer for (prompt, _), answer in zip(expected, answers, strict=True)]
        n_breaks = sum(not prompt.startswith(end) for end, (prompt, _) in zip(ends, expected[1:], strict=False))
        assert len(rows) == 1 + n_breaks or (across and len(rows) > 1 + n_breaks)
        assert not any(row.n_open for row in rows)
        n_across += across
    assert n_across < N / 2
