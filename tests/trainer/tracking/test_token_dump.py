"""The few responses that the report shows token by token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.run.run_dir import ANSWERS, GLOBAL_STEP, read_lines
from trainer.tracking.token_dump import KEPT_ROWS, KEPT_STEPS, KEPT_TOKENS, ResponseLog, pieces, shown, spread
from workers.batch import Batch


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def batch_of(tokenizer: PreTrainedTokenizerFast, *answers: str) -> Batch:
    """Each response follows the prompt "2+2="; its score is its index."""
    prompt = tokenizer.encode("2+2=")
    rows = [prompt + tokenizer.encode(answer) for answer in answers]
    ids = torch.tensor([token for row in rows for token in row])
    numbers = torch.arange(len(ids)).float()
    return Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={
            "input_ids": ids, "rollout_log_probs": -numbers, "old_log_probs": -numbers - 0.5, "advantages": numbers / 2,
            "sampled_mask": torch.cat([torch.arange(len(row)).ge(4).float() for row in rows]),
            "response_mask": torch.zeros(len(ids)),  # all rejected
        },
        rows={
            "uid": torch.arange(len(rows)), "score": torch.arange(len(rows)).float(),
            "trajectory": 30 + torch.arange(len(rows)), "part": torch.zeros(len(rows), dtype=torch.int64),
        },
        objects={"prompt": ["2+2="] * len(rows), "ground_truth": [{"sum": 4}] * len(rows)},
    )  # fmt: skip


class Actor:
    def __init__(self, ranks: int = 1) -> None:
        self.mesh = SimpleNamespace(output_ranks=range(ranks))
        self.asked: list[int] = []
        self.masks: list[torch.Tensor] = []

    def forward(self, batch: Batch, outputs: list[str]) -> Batch:
        self.asked.append(len(batch))
        self.masks.append(batch.tokens["response_mask"])
        return Batch(batch.lengths, tokens={"log_probs": batch.tokens["input_ids"] / 10})


def keep(run_dir: Path, tokenizer: Any, batch: Batch, *steps: int, total: int, forwards: bool = False, ranks: int = 1) -> Actor:
    actor = Actor(ranks)
    log = ResponseLog(run_dir, tokenizer, total, forwards=forwards)
    for step in steps:
        log.record(step, batch, cast(Any, actor))
    return actor


def test_response_has_its_tokens_with_log_probs_of_trainer_and_engine(tokenizer: Any, tmp_path: Path) -> None:
    actor = keep(tmp_path, tokenizer, batch_of(tokenizer, "4", "fünf"), 1, total=2)
    first, second = read_lines(tmp_path / ANSWERS)
    assert actor.asked == []
    assert first == {
        GLOBAL_STEP: 1, "uid": 0, "trajectory": 30, "part": 0, "prompt": "2+2=", "ground_truth": '{"sum": 4}',
        "score": 0.0, "length": 1, "tokens": ["4"], "rollout": [-4.0], "trainer": [-4.5], "advantages": [2.0],
    }  # fmt: skip
    assert second["tokens"] == ["f", "ü", "", "n", "f"] and second["rollout"] == [-9.0, -10.0, -11.0, -12.0, -13.0]


def test_missing_log_probs_are_computed_for_the_dump(tokenizer: Any, tmp_path: Path) -> None:
    actor = keep(tmp_path, tokenizer, batch_of(tokenizer, *"abcdefghijkl"), 1, total=1, forwards=True, ranks=10)
    entries = read_lines(tmp_path / ANSWERS)
    assert actor.asked == [10] and len(entries) == KEPT_ROWS, "at least a row per rank"
    assert all(entry["trainer"] == [pytest.approx(tokenizer.encode(entry["tokens"][0])[0] / 10)] for entry in entries)
    assert (entries[0]["score"], entries[-1]["score"]) == (0.0, 11.0)


def test_entry_of_a_session_has_its_observed_tokens_and_its_conversation(tokenizer: Any, tmp_path: Path) -> None:
    batch = batch_of(tokenizer, "abcdefgh", "x")
    batch.tokens["sampled_mask"][torch.tensor([5, 6, 9, 11])] = 0.0
    batch.objects["session"] = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "sampled": True}]}
    ] * 2
    keep(tmp_path, tokenizer, batch, 1, total=1)
    first, second = read_lines(tmp_path / ANSWERS)
    assert first["tokens"] == [*"abcdefgh"] and first["observed"] == [[1, 3], [5, 6], [7, 8]] and "observed" not in second
    assert [(turn["role"], turn["sampled"]) for turn in first["conversation"]] == [("user", False), ("assistant", True)]


def test_response_begins_with_its_first_sampled_token(tokenizer: Any, tmp_path: Path) -> None:
    """An observation, here the second and the last letter, is shown; it has no log-prob to be computed."""
    batch = batch_of(tokenizer, "abcd")
    batch.tokens["sampled_mask"][torch.tensor([5, 7])] = 0.0
    actor = keep(tmp_path, tokenizer, batch, 1, total=1, forwards=True)
    (entry,) = read_lines(tmp_path / ANSWERS)
    assert entry["tokens"] == list("abcd") and entry["length"] == 4
    assert torch.equal(actor.masks[0], batch.tokens["sampled_mask"]), "also of those that the loss excludes"


def test_parts_of_a_trajectory_are_one_entry(tokenizer: Any, tmp_path: Path) -> None:
    """Each part from its first sampled token on: "cd" follows the context "ab", which is not shown again."""
    batch = batch_of(tokenizer, "abcd", *"efghijklm", "ab").with_rows(
        trajectory=torch.tensor([3, *range(10, 19), 3]), part=torch.tensor([1, *[0] * 9, 0]),
    )  # fmt: skip
    batch.tokens["sampled_mask"][4:6] = 0.0
    actor = keep(tmp_path, tokenizer, batch, 1, total=1, forwards=True)
    entries = read_lines(tmp_path / ANSWERS)
    assert len(entries) == KEPT_ROWS and actor.asked == [KEPT_ROWS + 1]
    assert entries[0] == entries[0] | {"trajectory": 3, "part": 1, "score": 0.0, "tokens": [*"abcd"], "length": 4}
    first, last = batch.split_rows("advantages")[-1], batch.split_rows("advantages")[0]
    assert entries[0]["advantages"] == [*first[4:].tolist(), *last[6:].tolist()]


def test_log_probs_are_computed_in_the_first_and_the_last_step_and_a_tenth_of_the_others(tokenizer: Any, tmp_path: Path) -> None:
    actor = keep(tmp_path, tokenizer, batch_of(tokenizer, "4"), *range(1, 46), total=45, forwards=True)
    assert [entry[GLOBAL_STEP] for entry in read_lines(tmp_path / ANSWERS)] == [1, 11, 21, 31, 41, 45] and len(actor.asked) == 6


def test_steps_rows_and_tokens_are_limited(tokenizer: Any, tmp_path: Path) -> None:
    batch = batch_of(tokenizer, "x" * (KEPT_TOKENS + 9), *["y"] * 20)
    keep(tmp_path, tokenizer, batch, *range(1, 1051), total=1050)
    entries = read_lines(tmp_path / ANSWERS)
    steps = sorted({entry[GLOBAL_STEP] for entry in entries})
    assert len(steps) <= KEPT_STEPS and (steps[0], steps[-1]) == (1, 1050) and len(entries) == KEPT_ROWS * len(steps)
    assert (len(entries[0]["tokens"]), entries[0]["length"]) == (KEPT_TOKENS, KEPT_TOKENS + 9)


def test_nonfinite_values_are_null(tokenizer: Any, tmp_path: Path) -> None:
    batch = batch_of(tokenizer, "4")
    batch.tokens["rollout_log_probs"][4] = float("-inf")
    keep(tmp_path, tokenizer, batch, 1, total=1)
    assert read_lines(tmp_path / ANSWERS)[0]["rollout"] == [None]


def test_pieces_concatenate_to_the_text(tokenizer: Any) -> None:
    for text in ("", "a", " two words ", "naïve 🙂🙂 día\n", "日本"):
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids)
        assert len(found) == len(ids) and "".join(found) == text
    assert pieces(tokenizer, tokenizer.encode("é")[:1]) == ["\ufffd"], "half of a character"


def test_kept_rows_range_from_the_worst_to_the_best() -> None:
    scores = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert spread(scores, 3).tolist() == [0, 1, 4] and spread(scores, 9).tolist() == [0, 1, 2, 3, 4]
    assert spread(torch.tensor([]), 3).tolist() == []


def test_report_shows_the_last_steps_and_some_of_each_tenth() -> None:
    entries = [{GLOBAL_STEP: step, "row": row} for step in range(10, 1010, 10) for row in range(8)]
    found = [(entry[GLOBAL_STEP], entry["row"]) for entry in shown(entries)]
    assert [pair for pair in found if pair[0] >= 980] == [(step, row) for step in (980, 990, 1000) for row in range(8)]
    assert [pair for pair in found if pair[0] < 980] == [(10 + 100 * tenth, row) for tenth in range(10) for row in (0, 7)]
    assert shown([]) == [] and len(shown(entries[:8])) == 8
