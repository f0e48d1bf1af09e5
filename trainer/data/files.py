"""Concatenated rows of parquet and JSON-lines files."""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
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
STRUCTS = ("reward_model", "extra_info")
"""Columns of structs, whose fields are passed to scorers: text or a list in them would fail every reward."""


class Rows:
    """Rows of several files with stable indices: row i keeps its number whatever is filtered later."""

    def __init__(
        self, files: Sequence[str], required: Sequence[str], optional: Sequence[str] = (), structs: Sequence[str] = STRUCTS
    ) -> None:
        """required, optional: names of columns, or ``column.field`` of a struct. Other columns of parquet files are not read.

        structs: of the optional columns those that must be structs or null. Raises ValueError, one line, without files, for a
        missing or unreadable file, a missing column, one of another type, and an empty file.
        """
        if not files:
            raise ValueError("no data file is given")
        self._names = [str(name) for name in files]
        self._tables: list[pa.Table | _Lines] = [_read(name, required, optional, structs) for name in self._names]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def column(self, name: str) -> list[Any]:
        """All values of a column or ``column.field`` as Python objects; None for files without the column."""
        return [value for table in self._tables for value in _values(table, name)]

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, place = self._locate(row)
        table = self._tables[file]
        # A slice is a view: only this row becomes Python objects.
        return table[place] if isinstance(table, _Lines) else table.slice(place, 1).to_pylist()[0]

    def where(self, row: int) -> str:
        """Location of a row for messages: "FILE, row N", with N counted from 0 within the file."""
        file, place = self._locate(row)
        return f"{self._names[file]}, row {place}"

    def _locate(self, row: int) -> tuple[int, int]:
        # bisect_right: the end of a file is the first row of the next one.
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


Fields = dict[str, "Fields | str"]
"""Names of columns, or of the fields of a struct: those of its fields, or the name of a type."""


class _Lines:
    """Rows of a JSON-lines file, decoded when they are read.

    structs: columns that are objects or null. Raises ValueError for a line that is no object, or has such a column that is none.

    Not an Arrow table: there a column has one type, so 18 becomes 18.0 in a file that also has 0.5, every struct gets the fields
    of all others, and rows with text and numbers in a column are refused.
    """

    def __init__(self, path: Path, structs: Collection[str] = ()) -> None:
        self.fields: Fields = {}
        self._rows: list[str] = []
        for line, row in _objects(path):
            for name in structs:
                if not isinstance(row.get(name), dict | None):
                    kind = type(row[name]).__name__
                    raise ValueError(f"{path}, row {len(self._rows)}: {name} is a {kind}; it must be an object or null")
            self._rows.append(line)
            _add_fields(self.fields, row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """The row, with None for columns that only other rows have."""
        return dict.fromkeys(self.fields) | json.loads(self._rows[place])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


def _add_fields(fields: Fields, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        if isinstance(value, dict):
            known = fields.get(name)
            below = fields[name] = known if isinstance(known, dict) else {}
            _add_fields(below, value)
        elif fields.get(name, "null") == "null":
            fields[name] = "null" if value is None else type(value).__name__


def _fields_of(schema: pa.Schema | pa.StructType) -> Fields:
    return {field.name: _fields_of(field.type) if pa.types.is_struct(field.type) else str(field.type) for field in schema}


def _check_structs(name: str, fields: Fields, columns: Collection[str]) -> None:
    """Raise ValueError for one of the columns that is neither a struct nor null in every row."""
    for column in columns:
        kind = fields.get(column, "null")
        if not isinstance(kind, str) or kind == "null":
            continue
        if name.endswith(".parquet"):
            # A writer may choose another type for a column of nulls, such as string.
            values = pq.read_table(Path(name).expanduser(), columns=[column])[column]
            if values.null_count == len(values):
                continue
        raise ValueError(f"{name}: column {column!r} is {kind}; it must be a struct (an object) or null")


def check_file(name: str, required: Sequence[str], set_by: str = "", structs: Sequence[str] = ()) -> int | None:
    """Check that a file exists, is readable and has the columns, without reading its rows; return the number of rows.

    Reads the metadata of a parquet file, or the first line of a JSON-lines file, whose rows are not counted (None). set_by: the
    configuration keys that name the columns, for messages. Raises ValueError, one line, as Rows does.
    """
    path = _existing(name)
    n_rows = None
    try:
        if path.suffix == ".parquet":
            about = pq.read_metadata(path)
            fields, n_rows = _fields_of(about.schema.to_arrow_schema()), about.num_rows
            empty = n_rows == 0
        else:
            fields, first = {}, next(_objects(path), None)
            empty = first is None
            _add_fields(fields, first[1] if first is not None else {})
            # Where the first row has null, others may have an object.
            required = [column for column in required if fields.get(column.partition(".")[0]) != "null"]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, error) from error
    if empty:
        raise ValueError(f"{name}: has no rows; name another file")
    _check_columns(name, fields, required, set_by)
    _check_structs(name, fields, structs)
    return n_rows


def first_value(name: str, column: str) -> Any:
    """Value of ``column`` in the first row of a file."""
    path = Path(name).expanduser()
    if path.suffix == ".parquet":
        return value_of(next(pq.ParquetFile(path).iter_batches(1, columns=[column])).to_pylist()[0], column)
    return value_of(next(_objects(path))[1], column)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column or ``column.field`` of a row; None if the struct is null, is no struct, or has no such field."""
    name, *fields = column.split(".")
    value = row[name]
    for field in fields:
        value = value.get(field) if isinstance(value, Mapping) else None
    return value


def labels(values: Sequence[Any], name: str, where: Callable[[int], str]) -> list[Any]:
    """The values of the column ``name``, with "" for null: texts, or numbers. where: location of a row.

    Raises ValueError, one line, for a list or an object, by which rows cannot be grouped.
    """
    for row, value in enumerate(values):
        if not isinstance(value, Hashable):
            raise ValueError(f"{where(row)}: {name} is {value!r:.60}, a {type(value).__name__}; it must be a text or null")
    return ["" if value is None else value for value in values]


def distinct_labels(name: str, column: str) -> set[Any]:
    """Distinct values of a column of a parquet file; see labels."""
    values = pq.read_table(Path(name).expanduser(), columns=[column])[column]
    if not pa.types.is_nested(values.type):
        values = values.unique()
    return {*labels(values.to_pylist(), column, lambda row: f"{name}, row {row}")}


def _read(name: str, required: Sequence[str], optional: Sequence[str], structs: Sequence[str]) -> pa.Table | _Lines:
    path, objects = _existing(name), {*structs}.intersection(optional)
    try:
        if path.suffix == ".parquet":
            fields = _fields_of(pq.read_schema(path))
            _check_columns(name, fields, required)
            _check_structs(name, fields, sorted(objects))
            wanted = {column.partition(".")[0] for column in required} | set(optional)
            table = pq.read_table(path, columns=[column for column in fields if column in wanted])
        else:
            table = _Lines(path, objects | {column.partition(".")[0] for column in required if "." in column})
            if len(table):  # an empty file has no columns; its error below is the clearer one
                _check_columns(name, table.fields, required)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, error) from error
    if not len(table):
        raise ValueError(f"{name}: has no rows; name another file")
    return table


def _values(table: pa.Table | _Lines, name: str) -> list[Any]:
    column, *fields = name.split(".")
    if isinstance(table, _Lines):
        return [value_of(row, name) for row in table] if column in table.fields else [None] * len(table)
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
    return [row for _, row in _objects(path)]


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines with their objects."""
    # Line by line, so that the first row can be read without the others.
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); expected one object per line") from error
            except (ValueError, RecursionError) as error:  # a number of too many digits, too many levels
                raise ValueError(f"{path}, line {number}: cannot be read: {error}; write the row in another form") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__}; expected one object per line")
            yield line, row


def _check_columns(name: str, fields: Fields, required: Sequence[str], set_by: str = "") -> None:
    advice = f"; set {set_by}" if set_by else ""
    for wanted in required:
        column, *path = wanted.split(".")
        if column not in fields:
            raise ValueError(f"{name}: no column {column!r}; it has {', '.join(fields)}{advice}")
        kind = fields[column]
        for field in path:
            if isinstance(kind, str) or field not in kind:
                there = f"none ({kind})" if isinstance(kind, str) else ", ".join(kind)
                raise ValueError(f"{name}: column {column!r} has no field {field!r}; it has {there}{advice}")
            column, kind = f"{column}.{field}", kind[field]
