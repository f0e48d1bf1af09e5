"""Records of responses for scorers and servers."""

from pathlib import Path

import torch

from tests.reward_models import make_reward_model, tokenizer_of
from trainer.data.dataset import Prompt
from trainer.rewards.conversations import tokenizer_fingerprint
from trainer.rewards.remote.openrlhf_protocol import from_request, to_request
from trainer.rewards.requests import responses_to_score
from trainer.rewards.scoring import Response
from workers.batch import Batch
from workers.roles.rollout_role import decode_responses


def test_special_tokens_are_excluded_from_scored_text_and_sent_to_servers(tmp_path: Path) -> None:
    """Text is decoded as verl does for rewards; token ids are unchanged."""
    tokenizer = tokenizer_of(make_reward_model(tmp_path / "model", seed=1))
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    four, two = tokenizer("42", add_special_tokens=False)["input_ids"]
    written = [four, pad, two, eos]
    answers = Batch(torch.tensor([4]), {"input_ids": torch.tensor(written)}, {"finished": torch.tensor([1])})
    texts = decode_responses(answers, tokenizer)
    assert texts == ["42"] == [tokenizer.decode(written, skip_special_tokens=True)]
    cut = Batch(torch.tensor([3]), {"input_ids": torch.tensor(written[:3])}, {"finished": torch.tensor([0])})
    assert decode_responses(cut, tokenizer) == ["42"], "also for a truncated response"
    prompts = [Prompt(0, (two, two), "22", "mine", "4", {}, "22")]
    whole = Batch(torch.tensor([6]), {"input_ids": torch.tensor([two, two, *written])}, {"finished": torch.tensor([1])})
    (answer,) = responses_to_score(prompts, texts, whole, tokenizer, for_servers=True)
    assert answer.solution_str == "42" and answer.ids == [two, two, *written]
    request = to_request([answer])
    assert request["responses"] == ["42"] and request["query"] == ["224<pad>2<eos>"]
    assert from_request(request) == [answer]


def test_servers_receive_the_whole_sequence_and_rules_the_response(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_reward_model(tmp_path / "model", seed=1, own_words=True))
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("2+2=4<eos>", "2+2=fo")]
    messages = [{"role": "user", "content": "2+2"}]
    prompts = [Prompt(i, tuple(row[:4]), "2+2=", "mine", "4", {"i": i}, messages) for i, row in enumerate(rows)]
    batch = Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={"input_ids": torch.tensor([token for row in rows for token in row])},
        rows={"finished": torch.tensor([1, 0])},
    )
    plain = [Response("mine", "4", "4", {"i": 0}, True), Response("mine", "fo", "4", {"i": 1}, False)]
    assert responses_to_score(prompts, ["4", "fo"], batch, tokenizer, for_servers=False) == plain
    request = to_request(responses_to_score(prompts, ["4", "fo"], batch, tokenizer, for_servers=True))
    assert request["query"] == ["2+2=4<eos>", "2+2=fo"] and request["prompts"] == ["2+2=", "2+2="]
    assert request["token_ids"] == rows and request["messages"] == [messages] * 2
    assert request["tokenizers"] == [tokenizer_fingerprint(tokenizer)] * 2 and tokenizer_fingerprint(tokenizer) != ""


def test_servers_receive_a_session_as_a_whole_conversation(tmp_path: Path) -> None:
    """Its rendered prompt has the tools, which the data set's lacks; marks and thinking are not sent."""
    tokenizer = tokenizer_of(make_reward_model(tmp_path / "model", seed=1, own_words=True))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("add 2+2=", "4?<eos>5<eos>")]
    turns = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4?", "sampled": True, "reasoning_content": "hm"},
        {"role": "tool", "content": "no", "status": "ok"},
        {"role": "assistant", "content": "5", "sampled": True},
    ]
    row = Batch(
        lengths=torch.tensor([len(ids[0]) + len(ids[1])]),
        tokens={"input_ids": torch.tensor([*ids[0], *ids[1]])},
        rows={"finished": torch.tensor([1]), "prompt_length": torch.tensor([len(ids[0])])},
        objects={"session": [{"messages": turns}]},
    )
    prompts = [Prompt(0, (1,), "2+2=", "mine", "4", {}, turns[:1])]
    answers = responses_to_score(prompts, ["4?5"], row, tokenizer, for_servers=True)
    request = to_request(answers)
    assert request["prompts"] == ["add 2+2="] and request["query"] == ["add 2+2=4?<eos>5<eos>"] and request["whole"] == [True]
    assert request["messages"] == [[{"role": turn["role"], "content": turn["content"]} for turn in turns]]
    assert from_request(request) == answers
