"""Sessions in flight as arrays, for checkpoints: journals of those that continue, rows of those that have finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
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


def pack(responses: Sequence[Session | Batch | None], journals: Sequence[Journal | None]) -> dict[str, Tensor]:
    """Arrays of R responses: unfinished sessions with their journals, rows of finished ones, None for one that has not begun.

    By response: session_kind (0: not begun, 1: unfinished, 2: finished), session_turns, session_rows, session_text (bytes of its
    JSON). By turn: turn_key, turn_ordinal, turn_reason, turn_length. By row: row_length, and ROWS. By token, each with its kind
    in front: the columns of turns, of the interrupted turns, and of rows.
    """
    turns = [() if journal is None else journal.turns for journal in journals]
    flat = [turn for of_one in turns for turn in of_one]
    rows = [one for one in responses if isinstance(one, Batch)]
    partial = [one.partial if isinstance(one, Session) else None for one in responses]
    texts = [_text(one, journal).encode() for one, journal in zip(responses, journals, strict=True)]
    numbers: dict[str, list[int]] = {
        "session_kind": [0 if one is None else 2 if isinstance(one, Batch) else 1 for one in responses],
        "session_turns": [len(of_one) for of_one in turns],
        "session_rows": [len(one) if isinstance(one, Batch) else 0 for one in responses],
        "session_partial": [0 if columns is None else len(columns["input_ids"]) for columns in partial],
        "session_text_length": [len(text) for text in texts],
        "turn_key": [turn.key for turn in flat],
        "turn_ordinal": [turn.ordinal for turn in flat],
        "turn_reason": [REASONS.index(turn.finish_reason) for turn in flat],
        "turn_length": [len(turn.token_ids) for turn in flat],
        "row_length": [length for one in rows for length in one.lengths.tolist()],
    } | {f"row_{name}": [value for one in rows for value in one.rows[name].tolist()] for name in ROWS}
    arrays = {name: torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()}
    of_turns = {
        "input_ids": [turn.token_ids for turn in flat],
        "rollout_log_probs": [turn.log_probs for turn in flat],
        "weight_version": [turn.versions for turn in flat],
    }
    for name, dtype in COLUMNS.items():
        arrays[f"turn_{name}"] = _joined([*map(torch.from_numpy, of_turns[name])], dtype)
        arrays[f"partial_{name}"] = _joined([columns[name] for columns in partial if columns is not None], dtype)
        arrays[f"row_{name}"] = _joined([one.tokens[name] for one in rows], dtype)
    arrays["row_response_mask"] = _joined([one.tokens["response_mask"] for one in rows], torch.float32)
    arrays["session_text"] = torch.from_numpy(np.frombuffer(b"".join(texts), dtype=np.uint8).copy())
    return arrays


def unpack(arrays: Mapping[str, Tensor], sessions: Sequence[Session]) -> list[Session | Batch | None]:
    """What ``pack`` was given. sessions: new ones of all R responses; those that are unfinished get their journal and partial."""
    numbers = {name: values.tolist() for name, values in arrays.items() if values.dtype == torch.int64}
    texts = _split(arrays["session_text"], numbers["session_text_length"])
    turns = [
        SampledTurn(key, ordinal, ids.numpy(), log_probs.numpy(), versions.numpy(), REASONS[reason])
        for key, ordinal, reason, ids, log_probs, versions in zip(
            *(numbers[f"turn_{name}"] for name in ("key", "ordinal", "reason")),
            *(_split(arrays[f"turn_{name}"], numbers["turn_length"]) for name in COLUMNS),
            strict=True,
        )
    ]
    partial = {name: _split(arrays[f"partial_{name}"], numbers["session_partial"]) for name in COLUMNS}
    rows = Batch(
        arrays["row_length"],
        {name: arrays[f"row_{name}"] for name in (*COLUMNS, "response_mask")},
        {name: arrays[f"row_{name}"] for name in ROWS},
    )
    found: list[Session | Batch | None] = []
    first_turns = accumulate(numbers["session_turns"], initial=0)
    first_rows = accumulate(numbers["session_rows"], initial=0)
    for place, (session, kind, turn, row) in enumerate(
        zip(sessions, numbers["session_kind"], first_turns, first_rows, strict=False)
    ):
        facts: Any = json.loads(texts[place].numpy().tobytes() or b"null")
        if kind == 0:
            found.append(None)
        elif kind == 1:
            call, outcomes = facts["call"], facts["outcomes"]
            session.journal = Journal(session.task, turns[turn : turn + numbers["session_turns"][place]], outcomes)
            session.partial, session.interrupted = {name: columns[place] for name, columns in partial.items()}, tuple(call)
            found.append(session)
        else:
            own = rows.select(range(row, row + numbers["session_rows"][place]))
            own.rows["id"] = torch.full((len(own),), session.id)
            own.objects["session"] = [facts] * len(own)
            found.append(own)
    return found


def _text(one: Session | Batch | None, journal: Journal | None) -> str:
    if one is None:
        return ""
    if isinstance(one, Batch):
        return json.dumps(one.objects["session"][0])
    assert journal is not None, "an unfinished session has a journal"
    call = (one.call.key, one.call.ordinal) if one.interrupted is None else one.interrupted
    return json.dumps({"call": call, "outcomes": journal.outcomes})


def _joined(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *columns])


def _split(column: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(column.split(list(lengths)))
