"""Read raw data from local files or the Hugging Face hub, and run a whole conversion."""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_preprocess.writer import write
from trainer.data.files import read_lines
from workers.model_path import hub_unreachable, silence_hub

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SPLITS = ("train", "test")

DEFAULT_CONFIG = "data"
"""Folder of the hub's tree that has the files of a data set's default configuration; others have folders of their own names."""

Example = dict[str, Any]


MakeRow = Callable[[Example, str, int], Example]
"""(example, split, index) -> row to write"""


def preprocess(argv: Sequence[str] | None, make_row: MakeRow, *, hub: str, config: str | None, save_dir: str, about: str) -> None:
    """Command line of a converter: parse flags, read examples, write train.parquet and test.parquet.

    hub, config: name of the data set on the hub and its configuration. save_dir: default of --local_save_dir. about: text of
    --help. Exits with one line for bad data.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--local_save_dir", "--local_dir", default=save_dir, help="output directory (default: %(default)s)")
    parser.add_argument("--local_dataset_path", help=f"directory, .jsonl or .parquet file to read; default: {hub} on the hub")
    args = parser.parse_args(argv)
    # All rows are converted before the first file is written: bad data leaves nothing behind.
    try:
        splits = _from_hub(hub, config) if args.local_dataset_path is None else _from_files(args.local_dataset_path, config)
        rows = {split: [_row(make_row, *item) for item in zip(splits[split], repeat(split), count())] for split in splits}
    except ValueError as error:
        sys.exit(f"error: {error}")
    for split in rows:
        write(rows[split], args.local_save_dir, split)


def text(example: Example, field: str) -> str:
    """A field of an example. Raises KeyError if it is missing, ValueError if it is no text."""
    # A null would become the word None in a prompt.
    if not isinstance(value := example[field], str):
        raise ValueError(f"{field} is {value!r:.60}; it must be a text")
    return value


def _row(make_row: MakeRow, example: Example, split: str, index: int) -> Example:
    try:
        return make_row(example, split, index)
    except KeyError as error:
        raise ValueError(f"{split} row {index} has no field {error}; it has {', '.join(example)}") from error
    except ValueError as error:
        raise ValueError(f"{split} row {index}: {error}") from error


def _from_hub(name: str, config: str | None) -> dict[str, list[Example]]:
    """Examples of a data set on the hub, or in its cache where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download  # imported late: --help and local files do without

    silence_hub()
    unreachable = hub_unreachable()
    patterns = [f"{config or DEFAULT_CONFIG}/{split}*{suffix}" for split in _SPLITS for suffix in _SUFFIXES]
    try:
        copy = snapshot_download(name, repo_type="dataset", allow_patterns=patterns, local_files_only=unreachable is not None)
    except (OSError, errors.HTTPError) as error:
        reason = f"it is not in the cache, and {unreachable}" if unreachable else " ".join(str(error).split())
        raise ValueError(f"{name} cannot be loaded from the hub ({reason}); pass a local copy: --local_dataset_path") from error
    return _from_directory(Path(copy), config, f"{name} on the hub")


def _from_files(name: str, config: str | None) -> dict[str, list[Example]]:
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(f"--local_dataset_path {name}: no such file or directory")
    return _from_directory(path, config, f"--local_dataset_path {name}")


def _from_directory(path: Path, config: str | None, place: str) -> dict[str, list[Example]]:
    """Examples of files whose names start with train or test; in a copy of the hub's tree, those of ``config``.

    place: what ``path`` is, for the message of the ValueError if there are no such files.
    """
    folder = path / (config or DEFAULT_CONFIG)
    root = folder if folder.is_dir() else path
    files = [path] if path.is_file() else sorted(file for file in root.rglob("*") if file.suffix in _SUFFIXES)
    splits = {split: [example for file in files if file.name.startswith(split) for example in _read(file)] for split in _SPLITS}
    found = {split: examples for split, examples in splits.items() if examples}
    if not found:
        there = ", ".join(file.name for file in files[:10]) or "none"
        raise ValueError(f"{place}: expected files train*.jsonl or train*.parquet, and test*; found {there}")
    return found


def _read(file: Path) -> list[Example]:
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"{file}: not a {' or '.join(_SUFFIXES)} file")
    try:
        return pq.read_table(file).to_pylist() if file.suffix == ".parquet" else read_lines(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # these do not name the file
        raise ValueError(f"{file}: cannot be read: {str(error).splitlines()[0]}; copy or create it again") from error
