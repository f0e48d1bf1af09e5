"""The tokenizer with tools: tokens, and random conversations of an agent, which are only ever appended to."""

from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from data_preprocess import tiny_model
from data_preprocess.tiny_model import ROLES, TAGS, TOOL_TEMPLATE, character_tokenizer
from trainer.agents.formats import MalformedCall, call_format, parse_turn
from trainer.agents.native.calculator import calculator
from trainer.agents.tree import ConversationTree
from trainer.data.seam import Seams
from trainer.data.template_check import check_template
from workers.rollout.base import Completion

WORDS = ["calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}']
TOKENIZER = character_tokenizer("0123456789+", WORDS, with_tools=True)
HERMES = call_format("hermes")


def test_words_and_tags_are_tokens_after_the_round_trip_through_a_directory(tmp_path: Path) -> None:
    sizes = ["--hidden_size", "16", "--intermediate_size", "32", "--num_hidden_layers", "1"]
    tiny_model.main(["--save_dir", str(tmp_path), "--tools", "--alphabet", "0123456789+", "--words", *WORDS, *sizes])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab() and tokenizer.chat_template == TOOL_TEMPLATE
    assert len(tokenizer) == 2 + 11 + len(TAGS) + len(WORDS) + len(ROLES)
    text = '<|user|>1+2<eos><|assistant|><tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call><eos>'
    pieces = ["<|user|>", *"1+2", "<eos>", "<|assistant|>", "<tool_call>", WORDS[1], *"1+2", WORDS[2], "</tool_call>", "<eos>"]
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([number]) for number in ids] == pieces and tokenizer.decode(ids) == text
    # Roles and the end of a turn are special. Tags are not: parsers and scorers of a decoded response see them.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+2" + "".join(pieces[6:-1])
    assert ids == TOKENIZER(text)["input_ids"]


def test_the_template_is_append_only() -> None:
    report = check_template(TOKENIZER, {})
    assert all(report.append_only(probe) for probe in ("text", "white space", "thinking in the content", "tools"))


def completion(number: int, ids: list[int]) -> Completion:
    n = len(ids)
    return Completion(id=number, token_ids=(*ids,), log_probs=(-1.0,) * n, versions=(0,) * n, finish_reason="stop")


def sampled(rng: Random) -> list[int]:
    """A turn as a model in training may write it: a call, several, an answer, or anything that ends."""
    vocabulary = [token for token in range(len(TOKENIZER)) if token != TOKENIZER.eos_token_id]
    number = "".join(rng.choices("0123456789+", k=rng.randint(0, 7)))
    call = f"<tool_call>{WORDS[1]}{number}{WORDS[2]}</tool_call>"
    text = rng.choice([call, call * 2, number + call, number, call[: rng.randrange(len(call))]])
    ids = TOKENIZER(text)["input_ids"]
    for _ in range(rng.choice([0, 0, 1, 3])):
        ids.insert(rng.randint(0, len(ids)), rng.choice(vocabulary))
    return [*ids, TOKENIZER.eos_token_id]


def converse(rng: Random) -> tuple[ConversationTree, list[int], int]:
    """A conversation, the ids that the engine had at its end, and the number of malformed calls."""
    tree, malformed = ConversationTree(Seams(TOKENIZER, {}), on_break="refuse"), 0
    messages = [{"role": "user", "content": f"{rng.randint(100, 999)}+{rng.randint(100, 999)}"}]
    seen: list[int] = []
    for number in range(rng.randint(1, 5)):
        call = tree.request(messages, [calculator.schema])
        assert [*call.prompt_ids[: len(seen)]] == seen
        ids = sampled(rng)
        turn = parse_turn(HERMES, str(TOKENIZER.decode(ids[:-1])), [calculator.schema], turn=number)
        message = turn.message()
        tree.record(call, completion(number, ids), message)
        seen = [*call.prompt_ids, *ids]
        results = [{"role": "tool", "tool_call_id": each.id, "content": str(rng.randint(0, 2000))} for each in turn.calls]
        malformed += sum(isinstance(each, MalformedCall) for each in turn.calls)
        messages = [*messages, message, *(results or [{"role": "user", "content": "1+1"}])]
    return tree, seen, malformed


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_are_one_row_and_never_break(seed: int) -> None:
    rng, malformed = Random(seed), 0
    for _ in range(25):
        tree, seen, bad = converse(rng)
        (row,) = tree.rows(0)
        assert row.input_ids.tolist() == seen and not tree.breaks
        malformed += bad
    assert malformed > 0


def test_results_follow_the_sampled_turn_as_one_token_each_side() -> None:
    tree = ConversationTree(Seams(TOKENIZER, {}), on_break="refuse")
    messages = [{"role": "user", "content": "1+2"}]
    first = tree.request(messages, [calculator.schema])
    assert TOKENIZER.decode(first.prompt_ids) == "<tools>calculator</tools><|user|>1+2<eos><|assistant|>"
    ids = TOKENIZER(f"<tool_call>{WORDS[1]}1+2{WORDS[2]}</tool_call><eos>")["input_ids"]
    message = parse_turn(HERMES, str(TOKENIZER.decode(ids[:-1]))).message()
    tree.record(first, completion(0, ids), message)
    again = tree.request([*messages, message, {"role": "tool", "content": "Error: 3"}], [calculator.schema])
    added = again.prompt_ids[len(first.prompt_ids) + len(ids) :]
    assert TOKENIZER.decode(added) == "<tool_response>3</tool_response><|assistant|>", "other characters are dropped"
