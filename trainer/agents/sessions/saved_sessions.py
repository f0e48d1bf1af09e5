"""Sessions in flight as arrays, for checkpoints: journals of those that continue, rows of those that have finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.agents.sessions.protocol import Journal, SampledTurn
from trainer.agents.sessions.session_flow import COLUMNS, Session
from workers.batch import Batch
from workers.rollout.base import FinishReason

ROWS = ("part", "finished", "prompt_length")
REASONS: tuple[FinishReason, ...] = ("stop", "length")


def pack(finished: Sequence[Batch], unfinished: Sequence[tuple[Session, Journal]]) -> dict[str, Tensor]:
    """Arrays of F finished sessions, each with its rows, and U unfinished ones, whose journals have N turns.

    By unfinished session (U,): session_turns (its turns), session_calls (those that wait for a turn), session_text (bytes of its
    outcomes). By call that waits: session_key, session_ordinal, session_partial (tokens that were sampled for it). By turn (N,):
    turn_key, turn_ordinal, turn_reason, turn_length. By finished session (F,): finished_rows (its rows), finished_text (bytes of
    its facts). By row: row_length, and ROWS. By token: COLUMNS of turns (turn_*), interrupted turns (partial_*) and rows (row_*),
    and row_response_mask. outcomes, facts: the JSON texts, uint8.
    """
    turns = [turn for _, journal in unfinished for turn in journal.turns]
    # Of a session that no flow has had since it was restored, what was saved.
    interrupted = [
        session.interrupted or {(one.wanted.key, one.wanted.ordinal): one.partial for one in session.calls.values()}
        for session, _ in unfinished
    ]
    calls = [call for of_session in interrupted for call in of_session.items()]
    outcomes = [json.dumps(journal.outcomes).encode() for _, journal in unfinished]
    facts = [json.dumps(rows.objects["session"][0]).encode() for rows in finished]
    numbers: dict[str, list[int]] = {
        "session_turns": [len(journal.turns) for _, journal in unfinished],
        "session_calls": [len(of_session) for of_session in interrupted],
        "session_key": [key for (key, _), _ in calls],
        "session_ordinal": [ordinal for (_, ordinal), _ in calls],
        "session_partial": [len(partial["input_ids"]) for _, partial in calls],
        "session_text": [len(text) for text in outcomes],
        "turn_key": [turn.key for turn in turns],
        "turn_ordinal": [turn.ordinal for turn in turns],
        "turn_reason": [REASONS.index(turn.finish_reason) for turn in turns],
        "turn_length": [len(turn.token_ids) for turn in turns],
        "finished_rows": [len(rows) for rows in finished],
        "finished_text": [len(text) for text in facts],
        "row_length": [length for rows in finished for length in rows.lengths.tolist()],
    } | {f"row_{name}": [value for rows in finished for value in rows.rows[name].tolist()] for name in ROWS}
    of_turns = {
        "input_ids": [turn.token_ids for turn in turns],
        "rollout_log_probs": [turn.log_probs for turn in turns],
        "weight_version": [turn.versions for turn in turns],
    }
    arrays = {name: torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()}
    for name, dtype in COLUMNS.items():
        arrays[f"turn_{name}"] = _joined([*map(torch.from_numpy, of_turns[name])], dtype)
        arrays[f"partial_{name}"] = _joined([partial[name] for _, partial in calls], dtype)
        arrays[f"row_{name}"] = _joined([rows.tokens[name] for rows in finished], dtype)
    arrays["row_response_mask"] = _joined([rows.tokens["response_mask"] for rows in finished], torch.float32)
    arrays["outcomes"], arrays["facts"] = _bytes(outcomes), _bytes(facts)
    return arrays


def restore(arrays: Mapping[str, Tensor], sessions: Sequence[Session]) -> None:
    """Give new sessions the journals and interrupted turns of the U unfinished ones of ``pack``, in order."""
    columns = (_split(arrays, f"turn_{name}", "turn_length") for name in COLUMNS)
    numbers = (arrays[f"turn_{name}"].tolist() for name in ("key", "ordinal", "reason"))
    turns = iter(
        SampledTurn(key, ordinal, ids.numpy(), log_probs.numpy(), versions.numpy(), REASONS[reason])
        for key, ordinal, reason, ids, log_probs, versions in zip(*numbers, *columns, strict=True)
    )
    parts = zip(*(_split(arrays, f"partial_{name}", "session_partial") for name in COLUMNS), strict=True)
    names = (arrays[f"session_{name}"].tolist() for name in ("key", "ordinal"))
    calls = iter(((key, n), dict(zip(COLUMNS, part, strict=True))) for key, n, part in zip(*names, parts, strict=True))
    # Checkpoints of before sessions had several calls have one of each.
    n_calls = arrays["session_calls"].tolist() if "session_calls" in arrays else [1] * len(sessions)
    for session, n_turns, n, outcomes in zip(
        sessions, arrays["session_turns"].tolist(), n_calls, _texts(arrays, "outcomes", "session_text"), strict=True
    ):
        session.interrupted = dict(islice(calls, n))
        session.journal = Journal(session.task, [*islice(turns, n_turns)], outcomes, [*session.interrupted])


def unpack_rows(arrays: Mapping[str, Tensor]) -> list[Batch]:
    """The rows of each of the F finished sessions of ``pack``, in order."""
    names = (*COLUMNS, "response_mask")
    rows = Batch(
        arrays["row_length"], {name: arrays[f"row_{name}"] for name in names}, {name: arrays[f"row_{name}"] for name in ROWS}
    )
    of_session = torch.arange(len(rows)).split(arrays["finished_rows"].tolist())
    found = [rows.select(own) for own in of_session]
    for one, facts in zip(found, _texts(arrays, "facts", "finished_text"), strict=True):
        one.objects["session"] = [facts] * len(one)
    return found


def _joined(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *columns])


def _split(arrays: Mapping[str, Tensor], column: str, lengths: str) -> list[Tensor]:
    return list(arrays[column].split(arrays[lengths].tolist()))


def _bytes(texts: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(texts), dtype=np.uint8).copy())


def _texts(arrays: Mapping[str, Tensor], column: str, lengths: str) -> list[Any]:
    return [json.loads(text.numpy().tobytes()) for text in _split(arrays, column, lengths)]
