"""Responses of a step for people: all rows as parquet, a few as samples for loggers and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from trainer.run.logger import Sample
from trainer.run.run_dir import rollouts_file
from trainer.tracking.conversation import conversation_of
from workers.batch import Batch, counts_in


def first_samples(batch: Batch, n: int) -> list[Sample]:
    """The first response to each of the first ``n`` prompts.

    batch: rows uid, sample, score, reward_failed; objects data_source, prompt, response, ground_truth, reward_error, and session
    if the responses are sessions.
    """
    rows = (batch.rows["sample"] == 0).nonzero().flatten()[:n].tolist()
    samples = [
        Sample(
            uid=int(batch.rows["uid"][i]),
            data_source=batch.objects["data_source"][i],
            prompt=batch.objects["prompt"][i],
            response=batch.objects["response"][i],
            ground_truth=text_of(batch.objects["ground_truth"][i]),
            score=float(batch.rows["score"][i]),
            reward_error=batch.objects["reward_error"][i] if batch.rows["reward_failed"][i] else None,
        )
        for i in rows
    ]
    if "session" in batch.objects:
        for sample, i in zip(samples, rows, strict=True):
            sample["conversation"] = conversation_of(batch.objects["session"][i]["messages"])
    return samples


def write_dump(directory: Path, step: int, batch: Batch, left_out: Sequence[Batch] = ()) -> Path:
    """Write all rows to ``step_<N>.parquet``, followed by those that were left out of the step. The file is complete or absent.

    Columns: step, response_length (tokens in response_mask) and finish_reason (from rows finished), then every entry of ``rows``
    (numbers) and ``objects`` (text; other values as JSON; None as null) under its own name. score and reward are null where
    reward_failed is set.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = rollouts_file(directory, step)
    partial = path.with_name(path.name + ".partial")
    # "default" below fills columns that a part lacks with nulls: rows left out of the step may have fewer columns.
    tables = [_table(step, part) for part in (batch, *left_out)]
    pq.write_table(pa.concat_tables(tables, promote_options="default"), partial)
    return partial.replace(path)


def _table(step: int, batch: Batch) -> pa.Table:
    failed = batch.rows["reward_failed"].numpy()
    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(batch), pa.int64()),
        "response_length": pa.array(counts_in(batch.tokens["response_mask"], batch.lengths).tolist(), pa.int64()),
        "finish_reason": pa.array(["stop" if done else "length" for done in batch.rows["finished"].tolist()], pa.string()),
    }
    # A failed reward is stored as score 0 in the batch; null keeps it out of a mean over the column.
    nulls = dict.fromkeys(("score", "reward"), failed)
    columns |= {name: pa.array(values.numpy(), mask=nulls.get(name)) for name, values in batch.rows.items()}
    columns |= {name: _text_column(values) for name, values in batch.objects.items()}
    return pa.table(columns)


def _text_column(values: Sequence[Any]) -> pa.Array:
    return pa.array([None if value is None else text_of(value) for value in values], pa.string())


def text_of(value: Any) -> str:
    """``value`` if it is text, otherwise as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=_jsonable, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    """JSON fallback for numpy and torch values, which reward functions often return; anything else becomes its repr."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray | Tensor) else repr(value)
