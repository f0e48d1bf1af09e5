"""A batch as a safetensors file: every tensor bitwise identical, and loading it runs no code (unlike pickle)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workers.batch import Batch

_JSON = "json"  # entry with everything that is not a tensor, as bytes: the metadata in the file's header is limited to 100 MB
_KEPT_OBJECTS = ("data_source", "reward_extra")  # those that a step reads after its batch is collected; texts are in the parquet


def save_batch(path: Path, batch: Batch, facts: Mapping[str, Any]) -> Path:
    """Write tokens, rows, meta and the objects data_source and reward_extra of ``batch``. The file is complete or absent.

    facts: JSON about the file, returned by ``load_batch``.
    """
    header = {
        "facts": facts,
        "meta": batch.meta,
        "objects": {name: batch.objects[name] for name in _KEPT_OBJECTS if name in batch.objects},
    }
    columns = {"lengths": batch.lengths, _JSON: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    columns |= {f"tokens.{name}": value for name, value in batch.tokens.items()}
    columns |= {f"rows.{name}": value for name, value in batch.rows.items()}
    partial = path.with_name(path.name + ".partial")
    # clone: safetensors refuses tensors that share memory, as two columns of a batch may.
    save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in columns.items()}, partial)
    return partial.replace(path)


def load_batch(path: Path) -> tuple[Batch, dict[str, Any]]:
    """Read (batch, facts). Raises ValueError (one line) for a file that ``save_batch`` did not write."""
    try:
        columns = load_file(path)
        header = json.loads(columns.pop(_JSON).numpy().tobytes())
        lengths = columns.pop("lengths")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no dump of a batch: {type(error).__name__}: {error}") from error
    by_kind: dict[str, dict[str, torch.Tensor]] = {"tokens": {}, "rows": {}}
    for name, value in columns.items():
        kind, _, column = name.partition(".")
        by_kind[kind][column] = value
    return Batch(lengths, **by_kind, objects=header["objects"], meta=header["meta"]), header["facts"]
