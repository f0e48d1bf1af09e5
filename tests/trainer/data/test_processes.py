import os
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import descendants
from tests.trainer.data.tokenizers import byte_tokenizer
from tests.trainer.data.work import PART, dies, doubled, picky, pids
from trainer.data import processes
from trainer.data.files import Rows
from trainer.data.processes import in_processes
from trainer.data.turns import TurnEncoder

ROWS = range(3 * PART + 5)
CHAT = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
assert processes.PART == PART


def test_results_are_in_order_and_come_from_as_many_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert in_processes(doubled, ROWS, "numbers", 3) == [2 * row for row in ROWS]
    assert capfd.readouterr().out == "", "output of workers must not reach the console"
    assert 1 <= len({*in_processes(pids, ROWS, "numbers", 3)} - {os.getpid()}) <= 3
    assert {*in_processes(pids, ROWS, "numbers", 1)} == {*in_processes(pids, ROWS[:PART], "numbers", 3)} == {os.getpid()}
    assert in_processes(doubled, [], "numbers", 3) == []
    assert descendants() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_error_of_the_first_row_is_raised_whichever_process_is_faster(workers: int) -> None:
    with pytest.raises(ValueError, match=r"^row 7$"):
        in_processes(picky, ROWS, "numbers", workers)
    assert descendants() == []


def test_death_of_a_process_raises_instead_of_hanging() -> None:
    with pytest.raises(RuntimeError, match="a process that tokenises ended with exit code 9"):
        in_processes(dies, ROWS, "numbers", 2)


def test_work_that_cannot_be_pickled_runs_in_this_process() -> None:
    lock = threading.Lock()
    assert in_processes(lambda rows: [(row, lock.locked()) for row in rows], ROWS, "numbers", 2) == [(row, False) for row in ROWS]


def test_many_rows_take_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MANY", len(ROWS))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert os.getpid() not in in_processes(pids, ROWS, "numbers")
    assert {*in_processes(pids, ROWS[1:], "numbers")} == {os.getpid()}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert {*in_processes(pids, ROWS, "numbers")} == {os.getpid()}


def test_long_work_prints_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(processes, "tell", lines.append)
    monkeypatch.setattr(processes, "NEWS_SECONDS", 0.0)
    in_processes(doubled, ROWS, "numbers", 1)
    assert lines == [f"numbers: {n * PART:,} of {len(ROWS):,} rows, in 1 processes" for n in (1, 2, 3)]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(np.array_equal(left, right) and left.dtype == right.dtype for left, right in zip(one, other, strict=True))


def test_pairs_and_conversations_in_processes_are_bitwise_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(chat_template=CHAT, bos=True)
    n = PART + 60
    prompts: list[Any] = [f"text {i}" if i % 3 else [{"role": "user", "content": str(i)}] for i in range(n)]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(n)))
    rows, encoder = Rows([str(tmp_path / "rows.jsonl")], ["a"]), TurnEncoder(tokenizer, {})
    answers = [f"answer {i}" for i in range(n)]
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}] for i in range(n)]
    here = [*encoder.pairs(rows, prompts, answers), *chain.from_iterable(encoder.chats(rows, chats))]
    monkeypatch.setattr(processes, "MANY", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    there = [*encoder.pairs(rows, prompts, answers), *chain.from_iterable(encoder.chats(rows, chats))]
    assert same([turns.ids for turns in here], [turns.ids for turns in there])
    assert same([turns.trained for turns in here], [turns.trained for turns in there])
    assert [(turns.n_turns, turns.n_empty, turns.n_open) for turns in here] == [
        (turns.n_turns, turns.n_empty, turns.n_open) for turns in there
    ]
