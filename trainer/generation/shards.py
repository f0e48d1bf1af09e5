"""Storage of generated responses: shards that are complete or absent, and a manifest of the settings they were generated with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.files import read_lines
from trainer.rewards.http_client import EXHAUSTED
from trainer.run.run_dir import fsync_directory, write_atomic

MANIFEST = "manifest.json"
CONTENT = " (content)"
"""Suffix of the manifest's keys with the hash of what is at a path."""
SCORED = "scored"
"""The manifest's key for whether the answers have scores."""
Format = Literal["parquet", "jsonl"]
Row = dict[str, Any]
"""A prompt and its responses.

uid: row index over all data files. prompt: messages or text, as in the data. data_source, reward_model, extra_info: as in the
data, if present. prompt_length: in tokens. Lists with one entry per response: responses (text), log_probs (sum over its tokens,
as the engine sampled them), lengths (tokens), finish_reasons (stop | length). If scored: scores (None if the reward failed) and
reward_errors. With reward models: score_parts, {name: number} of the scorer (acc: its score) and each model's raw score.
"""
TYPES = {
    "uid": pa.int64(),
    "data_source": pa.string(),
    "prompt_length": pa.int64(),
    "responses": pa.list_(pa.string()),
    "log_probs": pa.list_(pa.float64()),
    "lengths": pa.list_(pa.int64()),
    "finish_reasons": pa.list_(pa.string()),
    "scores": pa.list_(pa.float64()),
    "reward_errors": pa.list_(pa.string()),
}


class Shards:
    """A directory of ``total`` shards."""

    def __init__(self, directory: Path, form: Format, total: int, manifest: Mapping[str, Any]) -> None:
        """manifest: {key: value}, JSON, of all settings that influence responses.

        Removes partially written shards. Raises ValueError, one line, if the directory has responses of other settings.
        """
        self.directory, self.form, self.total = directory, form, total
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / MANIFEST
        if path.exists():
            check_same(directory, json.loads(path.read_text(encoding="utf-8")), manifest)
        elif answers := shard_files(directory):
            raise ValueError(f"{directory} has {answers[0].name} and no {MANIFEST}: not from here; give another data.output_path")
        else:
            write_atomic(path, json.dumps(manifest, indent=1))
        # Left by a run that was killed while it wrote; the lock of the directory excludes a second writer.
        for torn in directory.glob("shard_*.partial"):
            torn.unlink()

    def path(self, index: int) -> Path:
        return self.directory / f"shard_{index:05d}.{self.form}"

    def missing(self) -> list[int]:
        return [index for index in range(self.total) if not self.path(index).exists()]

    def failures(self, index: int) -> int:
        """Number of rewards that have failed because a server was not available, in a shard that is there."""
        return unavailable(self._read(index))

    def failed(self) -> list[int]:
        """Shards that are there, and have such rewards."""
        return [index for index in range(self.total) if self.path(index).exists() and self.failures(index)]

    def rows(self) -> Iterator[Row]:
        """Rows of all shards that are there, in order."""
        for index in range(self.total):
            if self.path(index).exists():
                # One shard at a time: all responses need not fit into memory.
                yield from self._read(index)

    def _read(self, index: int) -> Sequence[Row]:
        path = self.path(index)
        return pq.read_table(path).to_pylist() if self.form == "parquet" else [*read_lines(path)]


def unavailable(rows: Sequence[Row]) -> int:
    """Number of rewards that have failed because a server was not available."""
    return sum(error is not None and EXHAUSTED in error for row in rows for error in row.get("reward_errors", ()))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a .parquet or .jsonl file atomically; equal rows give identical bytes.

    Raises ValueError, one line, for values that Parquet cannot hold in one column.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        if path.suffix == ".parquet":
            pq.write_table(_table(rows), file)
        else:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        # Sync before the rename: otherwise a crash of the machine could leave a complete name with missing content.
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([_without_empty(row.get(name)) for row in rows], TYPES.get(name))
        except (pa.ArrowException, OverflowError) as error:
            problem = str(error).splitlines()[0]
            raise ValueError(f"column {name!r} cannot be parquet: {problem}; data.output_format=jsonl takes it") from error
    return pa.table(columns)


def _without_empty(value: Any) -> Any:
    """``value`` with null for each empty object: Parquet has no type for an object without fields."""
    if isinstance(value, dict):
        return {name: _without_empty(item) for name, item in value.items()} or None
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def shard_files(directory: Path) -> list[Path]:
    """Paths of the shards in a directory, in order."""
    return sorted(path for path in directory.iterdir() if re.fullmatch(r"shard_\d+\.(parquet|jsonl)", path.name))


def check_same(directory: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ValueError, with the first difference, if the manifests differ."""
    # SCORED first: only manifests of scored answers have the keys of the reward, which all differ then.
    for key in dict.fromkeys([SCORED, *new, *old]):
        if key.endswith(CONTENT) and key not in old:  # of an earlier version, which did not compare the content
            continue
        if old.get(key) != new.get(key):
            was, now = (json.dumps(manifest.get(key), ensure_ascii=False) for manifest in (old, new))
            about = " (selection.score, or a file of selection.*)" if key == SCORED else ""
            raise ValueError(
                f"{directory} has answers of another run: {key} was {was:.200} and is {now:.200}{about}; put it back, or give "
                "another data.output_path"
            )
