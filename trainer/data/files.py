"""Concatenated rows of parquet and JSON-lines files."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_JSON = (".jsonl", ".json")
_MAKERS = {
    "sort_digits": "scripts/quickstart.sh",
    "calculator": "scripts/calculator.sh",
    "search_local": "scripts/search_local.sh",
    "gsm8k": "python -m data_preprocess.gsm8k --local_save_dir {}",
    "math": "python -m data_preprocess.math_dataset --local_save_dir {}",
}
"""Command that creates the data directory of this name, for error messages; the examples use these names."""


class Rows:
    """Rows of several files with stable indices: row i keeps its number whatever is filtered later."""

    def __init__(self, files: Sequence[str], required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """required, optional: names of columns, or ``column.field`` of a struct. Other columns are not read.

        Raises ValueError, one line, without files, for a missing or unreadable file, a missing column and an empty file.
        """
        if not files:
            raise ValueError("no data file is given")
        self._names = [str(name) for name in files]
        self._tables = [_read(name, required, optional) for name in self._names]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def column(self, name: str) -> list[Any]:
        """All values of a column or ``column.field`` as Python objects; None for files without the column."""
        return [value for table in self._tables for value in _values(table, name)]

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, place = self._locate(row)
        # A slice is a view: only this row becomes Python objects.
        return self._tables[file].slice(place, 1).to_pylist()[0]

    def where(self, row: int) -> str:
        """Location of a row for messages: "FILE, row N", with N counted from 0 within the file."""
        file, place = self._locate(row)
        return f"{self._names[file]}, row {place}"

    def _locate(self, row: int) -> tuple[int, int]:
        # bisect_right: the end of a file is the first row of the next one.
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def check_file(name: str, required: Sequence[str], set_by: str = "") -> int | None:
    """Check that a file exists, is readable and has the columns, without reading its rows; return the number of rows.

    Reads the metadata of a parquet file, or the first line of a JSON-lines file, whose rows are not counted (None). set_by: the
    configuration keys that name the columns, for messages. Raises ValueError, one line, as Rows does.
    """
    path = _existing(name)
    n_rows = None
    try:
        if path.suffix == ".parquet":
            about = pq.read_metadata(path)
            schema, n_rows = about.schema.to_arrow_schema(), about.num_rows
            empty = n_rows == 0
        else:
            first = next(_objects(path), None)
            schema, empty = pa.Table.from_pylist([] if first is None else [first]).schema, first is None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, error) from error
    if empty:
        raise ValueError(f"{name}: has no rows; name another file")
    _check_columns(name, schema, required, set_by)
    return n_rows


def first_value(name: str, column: str) -> Any:
    """Value of ``column`` in the first row of a file."""
    path = Path(name).expanduser()
    if path.suffix == ".parquet":
        return value_of(next(pq.ParquetFile(path).iter_batches(1, columns=[column])).to_pylist()[0], column)
    return value_of(next(_objects(path)), column)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column or ``column.field`` of a row; None if the struct is null or has no such field."""
    name, *fields = column.split(".")
    value = row[name]
    for field in fields:
        value = None if value is None else value.get(field)
    return value


def values_of(name: str, column: str) -> list[Any]:
    """Distinct values of a column of a parquet file."""
    return pq.read_table(Path(name).expanduser(), columns=[column])[column].unique().to_pylist()


def _read(name: str, required: Sequence[str], optional: Sequence[str]) -> pa.Table:
    path = _existing(name)
    try:
        if path.suffix == ".parquet":
            schema = pq.read_schema(path)
            _check_columns(name, schema, required)
            wanted = {column.partition(".")[0] for column in required} | set(optional)
            table = pq.read_table(path, columns=[column for column in schema.names if column in wanted])
        else:
            table = pa.Table.from_pylist(read_lines(path))
            if len(table):  # an empty file has no columns; its error below is the clearer one
                _check_columns(name, table.schema, required)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, error) from error
    if not len(table):
        raise ValueError(f"{name}: has no rows; name another file")
    return table


def _values(table: pa.Table, name: str) -> list[Any]:
    column, *fields = name.split(".")
    if column not in table.column_names:
        return [None] * len(table)
    return (pc.struct_field(table[column], fields) if fields else table[column]).to_pylist()


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix not in (".parquet", *_JSON):
        raise ValueError(f"{name}: not a .parquet, .jsonl or .json file; write it as one")
    if not path.is_file():
        if not path.parent.is_dir():
            maker = _MAKERS.get(path.parent.name)
            made = "" if maker is None else f", or run {maker.format(path.parent)}"
            raise ValueError(f"{name}: no such file; there is no directory {path.parent} either; name another{made}")
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".parquet", *_JSON))
        raise ValueError(f"{name}: no such file; {path.parent} has {', '.join(there) or 'no parquet or JSON-lines file'}")
    return path


def _unreadable(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name}: cannot be read: {str(error).splitlines()[0]}; copy or create it again")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file. Raises ValueError with the line number for anything else."""
    return list(_objects(path))


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    # Line by line, so that the first row can be read without the others.
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); expected one object per line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__}; expected one object per line")
            yield row


def _check_columns(name: str, schema: pa.Schema, required: Sequence[str], set_by: str = "") -> None:
    advice = f"; set {set_by}" if set_by else ""
    for wanted in required:
        column, *path = wanted.split(".")
        if column not in schema.names:
            raise ValueError(f"{name}: no column {column!r}; it has {', '.join(schema.names)}{advice}")
        kind = schema.field(column).type
        for field in path:
            fields = [kind.field(i).name for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []
            if field not in fields:
                there = ", ".join(fields) or f"none ({kind})"
                raise ValueError(f"{name}: column {column!r} has no field {field!r}; it has {there}{advice}")
            column, kind = f"{column}.{field}", kind.field(field).type
