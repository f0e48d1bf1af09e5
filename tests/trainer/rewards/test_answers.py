"""What scorers and servers are told of an answer."""

from pathlib import Path

import torch

from tests.reward_models import make_reward_model, tokenizer_of
from trainer.data.conversations import words_of
from trainer.data.dataset import Prompt
from trainer.rewards.answers import to_score
from trainer.rewards.scoring import Answer
from trainer.rewards.wire import to_request
from workers.batch import Batch


def test_servers_are_told_of_the_whole_sequence_and_rules_of_the_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_reward_model(tmp_path / "model", seed=1, own_words=True))
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("2+2=4<eos>", "2+2=fo")]
    messages = [{"role": "user", "content": "2+2"}]
    prompts = [Prompt(i, tuple(row[:4]), "2+2=", "mine", "4", {"i": i}, messages) for i, row in enumerate(rows)]
    batch = Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={"input_ids": torch.tensor([token for row in rows for token in row])},
        rows={"finished": torch.tensor([1, 0])},
    )
    plain = [Answer("mine", "4", "4", {"i": 0}, True), Answer("mine", "fo", "4", {"i": 1}, False)]
    assert to_score(prompts, ["4", "fo"], batch, tokenizer, for_servers=False) == plain
    told = to_request(to_score(prompts, ["4", "fo"], batch, tokenizer, for_servers=True))
    assert told["query"] == ["2+2=4<eos>", "2+2=fo"] and told["prompts"] == ["2+2=", "2+2="]
    assert told["token_ids"] == rows and told["messages"] == [messages] * 2
    assert told["tokenizers"] == [words_of(tokenizer)] * 2 and words_of(tokenizer) != ""
