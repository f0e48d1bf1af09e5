"""The one place that knows the columns of the data files."""

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
    """A row for the RL trainer. ``extra`` joins split and index in extra_info."""
    return {
        "data_source": data_source,
        "prompt": chat(prompt),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def sft_row(prompt: str, response: str) -> dict[str, Any]:
    """A row for supervised training."""
    return {"prompt": chat(prompt), "response": response}


def preference_row(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    """A row for training a reward model."""
    return {"prompt": chat(prompt), "chosen": chosen, "rejected": rejected}


def write(rows: Sequence[dict[str, Any]], directory: str, split: str) -> Path:
    """``directory/split.parquet``, whole or not at all. Says what it wrote."""
    path = Path(directory).expanduser() / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    unfinished.replace(path)
    print(f"{path}: {len(rows)} rows")
    return path
