"""Columns of the data files, defined here only, and atomic writing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def chat(prompt: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": prompt}]


def rl_row(
    *, data_source: str, prompt: str, ability: str, ground_truth: str, split: str, index: int, **extra: Any
) -> dict[str, Any]:
    """Row for RL. ``extra`` is added to extra_info, next to split and index."""
    return {
        "data_source": data_source,
        "prompt": chat(prompt),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def sft_row(prompt: str, response: str) -> dict[str, Any]:
    """Row for supervised fine-tuning."""
    return {"prompt": chat(prompt), "response": response}


def preference_row(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    """Row for training a reward model."""
    return {"prompt": chat(prompt), "chosen": chosen, "rejected": rejected}


def write(rows: Sequence[dict[str, Any]], directory: str, split: str) -> Path:
    """Write ``directory/split.parquet`` atomically and print its path and size."""
    path = Path(directory).expanduser() / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write under another name and rename: an interrupted run must not leave a truncated file that looks complete.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    unfinished.replace(path)
    print(f"{path}: {len(rows)} rows")
    return path
