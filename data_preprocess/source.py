"""Read raw data from local files or the Hugging Face hub, and run a whole conversion."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_preprocess.writer import write
from trainer.data.files import read_lines

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SPLITS = ("train", "test")

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


def _row(make_row: MakeRow, example: Example, split: str, index: int) -> Example:
    try:
        return make_row(example, split, index)
    except KeyError as error:
        raise ValueError(f"{split} row {index} has no field {error}; it has {', '.join(example)}") from error
    except ValueError as error:
        raise ValueError(f"{split} row {index}: {error}") from error


def _from_hub(name: str, config: str | None) -> dict[str, list[Example]]:
    if find_spec("datasets") is None:
        raise ValueError(
            "the hub needs the package `datasets` (pip install datasets); or pass a local copy: --local_dataset_path"
        )
    from datasets import load_dataset  # an optional package

    try:
        data = load_dataset(name, config)
    except OSError as error:  # base class of ConnectionError and DatasetNotFoundError
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be loaded from the hub ({reason}); pass a local copy: --local_dataset_path") from error
    return {split: list(data[split]) for split in _SPLITS}


def _from_files(name: str, config: str | None) -> dict[str, list[Example]]:
    """Examples of files whose names start with train or test; in a copy of the hub's tree, those of ``config``."""
    path = Path(name).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        root = path / config if config is not None and (path / config).is_dir() else path
        files = sorted(file for file in root.rglob("*") if file.suffix in _SUFFIXES)
    else:
        raise ValueError(f"--local_dataset_path {name}: no such file or directory")
    splits = {split: [example for file in files if file.name.startswith(split) for example in _read(file)] for split in _SPLITS}
    found = {split: examples for split, examples in splits.items() if examples}
    if not found:
        there = ", ".join(file.name for file in files[:10]) or "none"
        raise ValueError(f"--local_dataset_path {name}: expected files train*.jsonl or train*.parquet, and test*; found {there}")
    return found


def _read(file: Path) -> list[Example]:
    if file.suffix == ".parquet":
        return pq.read_table(file).to_pylist()
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"{file}: not a {' or '.join(_SUFFIXES)} file")
    return read_lines(file)
