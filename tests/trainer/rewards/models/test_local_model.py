"""Inputs and scores of local reward models. Complete runs: tests/trainer/ppo."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from tests.trainer.data.tokenizers import byte_tokenizer
from tests.trainer.rewards.config import scoring_model
from trainer.data.dataset import Prompt
from trainer.rewards.conversations import Conversations
from trainer.rewards.models.local_model import LocalModel
from workers.batch import Batch

TOKENIZER = byte_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")


@dataclass
class Engine:
    """Model whose score of a row is its last token, and of a token its id. Records its inputs."""

    asked: list[Batch] = field(default_factory=list)

    def forward(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        self.asked.append(batch)
        rows = [row.float() for row in batch.split_rows("input_ids")]
        last = torch.stack([row[-1] for row in rows])
        if list(outputs) == ["scores"]:
            return Batch(batch.lengths, rows={"scores": torch.where(last == 7, torch.nan, last)})
        before = torch.cat([torch.cat([torch.zeros(1), row[:-1]]) for row in rows])
        return Batch(batch.lengths, tokens={"values": before}, rows={"last_value": last})


def answers(*rows: list[int], finished: Sequence[bool] | None = None) -> Batch:
    """The first token of each is the prompt."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.cat([torch.tensor([0.0] + [1.0] * (len(row) - 1)) for row in rows])
    ids = torch.tensor([token for row in rows for token in row])
    ends = torch.tensor(finished if finished is not None else [True] * len(rows))
    return Batch(lengths, tokens={"input_ids": ids, "response_mask": mask}, rows={"finished": ends})


def prompt(messages: Any) -> Prompt:
    return Prompt(0, (), "", "", None, {}, messages)


def local(conversations: Conversations | None = None, *, longest: int | None = None, **changes: Any) -> tuple[LocalModel, Engine]:
    engine = Engine()
    return LocalModel("a", scoring_model(**changes), cast(Any, engine), conversations, longest=longest, vocabulary=300), engine


def test_policy_tokens_are_not_reencoded() -> None:
    model, engine = local()
    scores, at_tokens = model.score(answers([3, 4, 5], [3, 6]), [], [])
    assert at_tokens is None and [score.value for score in scores] == [5.0, 6.0] and scores[0].extra == {}
    (asked,) = engine.asked
    assert asked.tokens["input_ids"].tolist() == [3, 4, 5, 3, 6] and asked.lengths.tolist() == [3, 2]


def test_other_tokenizer_encodes_conversations_and_reports_failures() -> None:
    model, engine = local(Conversations(TOKENIZER, {}))
    asked = [prompt("ab"), prompt([{"role": "user", "content": "cd"}]), prompt([{"role": "critic", "content": "ef"}])]
    scores, _ = model.score(answers([3, 4], [3, 4], [3, 4], finished=[True, False, True]), asked, ["1", "2", "3"])
    read = [TOKENIZER.decode(row) for row in engine.asked[0].split_rows("input_ids")]
    assert read == ["ab1<eos>", "cd2"]
    assert [score.value is None for score in scores] == [False, False, True]
    assert (
        scores[2].error
        == "the conversation, message 0: the role is 'critic'; supported are system, developer, user, assistant, tool"
    )


def test_other_tokenizer_encodes_the_messages_of_a_session() -> None:
    model, engine = local(Conversations(TOKENIZER, {}))
    asked = [{"role": "user", "content": "1+1"}]
    more = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}, {"role": "assistant", "content": "2"}]
    batch = answers([3, 4], [3, 4])
    batch.objects["session"] = [{"messages": asked + more}, {"messages": asked}]
    scores, _ = model.score(batch, [prompt(asked)] * 2, ["text", "text"])
    assert [TOKENIZER.decode(row) for row in engine.asked[0].split_rows("input_ids")] == ["1+13no2<eos>"]
    assert scores[0].value is not None and scores[1].error == "the conversation has no turn of the model"


@pytest.mark.parametrize(("how", "read"), [("left", [5, 6, 8]), ("right", [3, 4, 5])])
def test_longer_rows_are_truncated_and_counted(how: str, read: list[int]) -> None:
    model, engine = local(longest=3, truncation=how)
    scores, _ = model.score(answers([3, 4, 5, 6, 8], [3, 4, 5]), [], [])
    assert engine.asked[0].split_rows("input_ids")[0].tolist() == read
    assert [score.extra for score in scores] == [{"a_cut": 1.0}, {"a_cut": 0.0}]


def test_failed_row_has_a_reason_and_affects_no_other_row() -> None:
    model, _ = local(longest=3)
    scores, _ = model.score(answers([3, 4, 5, 6], [3, 400], [3, 7], [3, 4]), [], [])
    assert [score.value for score in scores] == [None, None, None, 4.0]
    assert [score.error for score in scores] == [
        "the conversation has 4 tokens, and the model reads 3 at most",
        "the conversation has token 400, the model's vocabulary 300",
        "the model's score is nan",
        None,
    ]


def test_model_is_not_called_without_readable_rows() -> None:
    model, engine = local(longest=1)
    scores, _ = model.score(answers([3, 4], [3, 4]), [], [])
    assert engine.asked == [] and all(score.value is None for score in scores)


def test_token_scores_are_those_of_response_tokens() -> None:
    """A token's score is that of the state after it; prompts and failed rows have none."""
    model, _ = local(longest=3, kind="token")
    scores, at_tokens = model.score(answers([3, 4, 5], [3, 4, 5, 6], [9, 8]), [], [])
    assert at_tokens is not None and at_tokens.tolist() == [0, 4, 5, 0, 0, 0, 0, 0, 8]
    assert [score.value for score in scores] == [9.0, None, 8.0]
