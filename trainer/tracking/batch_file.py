"""A batch as a safetensors file: every tensor bitwise identical, and loading it runs no code (unlike pickle)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workers.batch import Batch

_JSON = "json"  # entry with everything that is not a tensor, as bytes: the metadata in the file's header is limited to 100 MB
_KEPT_OBJECTS = ("data_source", "reward_extra")  # those that a step reads after its batch is collected; texts are in the parquet


def save_batch(path: Path, batch: Batch, facts: Mapping[str, Any], sessions: Batch | None = None) -> Path:
    """Write tokens, rows, meta and the objects data_source and reward_extra of ``batch``. The file is complete or absent.

    facts: JSON about the file, returned by ``load_batch``. sessions: record of the step's conversations (record_of), returned by
    ``load_sessions``.
    """
    header = {
        "facts": facts,
        "meta": batch.meta,
        "objects": {name: batch.objects[name] for name in _KEPT_OBJECTS if name in batch.objects},
    } | ({} if sessions is None else {"sessions": sessions.objects})
    columns = {"lengths": batch.lengths, _JSON: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    columns |= {f"tokens.{name}": value for name, value in batch.tokens.items()}
    columns |= {f"rows.{name}": value for name, value in batch.rows.items()}
    if sessions is not None:
        columns |= {"session_lengths": sessions.lengths}
        columns |= {f"session_tokens.{name}": value for name, value in sessions.tokens.items()}
        columns |= {f"session_rows.{name}": value for name, value in sessions.rows.items()}
    partial = path.with_name(path.name + ".partial")
    # clone: safetensors refuses tensors that share memory, as two columns of a batch may.
    save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in columns.items()}, partial)
    return partial.replace(path)


def load_batch(path: Path) -> tuple[Batch, dict[str, Any]]:
    """Read (batch, facts). Raises ValueError (one line) for a file that ``save_batch`` did not write."""
    columns, header = _read(path)
    columns_of = partial(_columns, columns)
    batch = Batch(columns["lengths"], columns_of("tokens"), columns_of("rows"), header["objects"], header["meta"])
    return batch, header["facts"]


def load_sessions(path: Path) -> Batch | None:
    """Read the conversations of a dump; None if it has none. Raises like ``load_batch``."""
    columns, header = _read(path)
    if "sessions" not in header:
        return None
    columns_of = partial(_columns, columns)
    return Batch(columns["session_lengths"], columns_of("session_tokens"), columns_of("session_rows"), header["sessions"])


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        columns = load_file(path)
        header = json.loads(columns.pop(_JSON).numpy().tobytes())
        columns["lengths"]  # every dump has it
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no dump of a batch: {type(error).__name__}: {error}") from error
    return columns, header


def _columns(columns: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{kind}."): value for name, value in columns.items() if name.startswith(f"{kind}.")}
