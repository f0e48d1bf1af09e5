import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.files import Rows, check_file, distinct_labels, first_value, value_of


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_files_of_both_kinds_end_to_end(tmp_path: Path) -> None:
    first = [{"a": i, "b": {"c": str(i)}, "x": {"i": i}, "unread": 1} for i in range(3)]
    second = [{"a": i, "b": {"c": str(i), "d": None}} for i in range(3, 5)]
    files = [
        parquet(tmp_path / "1.parquet", first),
        jsonl(tmp_path / "2.jsonl", "\n".join(map(json.dumps, second)) + "\n\n"),
        parquet(tmp_path / "3.parquet", first),
    ]
    rows = Rows(files, ["a", "b.c"], ["x"])
    assert len(rows) == 8
    assert rows.column("a") == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows.column("x") == [{"i": 0}, {"i": 1}, {"i": 2}, None, None, {"i": 0}, {"i": 1}, {"i": 2}]
    assert [rows[i]["a"] for i in range(8)] == rows.column("a")
    assert "unread" not in rows[0] and rows[4]["b"] == {"c": "4", "d": None}
    assert [rows.where(i) for i in (2, 3, 7)] == [f"{files[0]}, row 2", f"{files[1]}, row 0", f"{files[2]}, row 2"]


def test_fields_of_structs(tmp_path: Path) -> None:
    first = [{"info": {"q": "1", "deep": {"a": 1, "b": 2}}, "unread": 1}, {"info": None, "unread": 1}]
    second = [{"info": {"q": "2", "deep": None}}]
    files = [parquet(tmp_path / "1.parquet", first), jsonl(tmp_path / "2.jsonl", json.dumps(second[0]))]
    rows = Rows(files[:1], ["info.q", "info.deep.a"])
    assert rows.column("info.q") == ["1", None] and rows.column("info.deep.a") == [1, None]
    assert rows.column("unread") == [None, None]
    both = Rows(files, ["info.q"])
    assert both.column("info.q") == ["1", None, "2"] == [value_of(both[row], "info.q") for row in range(3)]
    assert [value_of(both[row], "info.deep.b") for row in range(3)] == [2, None, None]
    assert [first_value(file, "info.q") for file in files] == ["1", "2"] and first_value(files[0], "info.deep.b") == 2
    assert check_file(files[0], ["info.deep.b"]) == 2
    with pytest.raises(ValueError) as error:
        check_file(files[0], ["info.deep.c"], "data.prompt_key")
    assert str(error.value) == f"{files[0]}: column 'info.deep' has no field 'c'; it has a, b; set data.prompt_key"
    assert error_of(files[:1], ["info.q.c"]) == f"{files[0]}: column 'info.q' has no field 'c'; it has none (string)"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    parquet(tmp_path / "train.parquet", [{"a": 1}])
    assert len(Rows(["~/train.parquet"], ["a"])) == 1


def error_of(files: list[str], required: list[str]) -> str:
    with pytest.raises(ValueError) as error:
        Rows(files, required)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_errors_name_the_file_and_its_columns(tmp_path: Path) -> None:
    good = parquet(tmp_path / "good.parquet", [{"a": 1, "b": {"c": 2}, "d": 3}])
    missing = str(tmp_path / "train.parquet")
    assert error_of([], ["a"]) == "no data file is given"
    assert error_of([good, missing], ["a"]) == f"{missing}: no such file; {tmp_path} has good.parquet"
    (tmp_path / "other").mkdir()
    assert error_of([str(tmp_path / "other/a.json")], ["a"]).endswith("/other has no parquet or JSON-lines file")
    assert "there is no directory" in error_of([str(tmp_path / "no" / "train.parquet")], ["a"])
    for made, maker in (
        ("sort_digits", "scripts/quickstart.sh"),
        ("gsm8k", f"python -m data_preprocess.gsm8k --local_save_dir {tmp_path}/gsm8k"),
        ("math", f"python -m data_preprocess.math_dataset --local_save_dir {tmp_path}/math"),
    ):
        assert error_of([str(tmp_path / made / "train.parquet")], ["a"]).endswith(f"; name another, or run {maker}")
    assert error_of([good], ["prompt"]) == f"{good}: no column 'prompt'; it has a, b, d"
    assert error_of([good], ["b.truth"]) == f"{good}: column 'b' has no field 'truth'; it has c"
    assert error_of([good], ["d.truth"]) == f"{good}: column 'd' has no field 'truth'; it has none (int64)"
    lines = jsonl(tmp_path / "lines.jsonl", '{"a": 1}\n{"b": 1}\n')
    assert error_of([lines], ["prompt"]).startswith(f"{lines}: no column 'prompt'")


def test_errors_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), empty)
    assert error_of([str(empty)], ["a"]) == f"{empty}: has no rows; name another file"
    assert "has no rows" in error_of([jsonl(tmp_path / "empty.jsonl", "\n")], ["a"])
    assert "cannot be read" in error_of([jsonl(tmp_path / "broken.parquet", "PAR1 no more")], ["a"])
    assert "line 2: not JSON" in error_of([jsonl(tmp_path / "broken.jsonl", '{"a": 1}\n{"a": \n')], ["a"])
    assert "line 1: a list" in error_of([jsonl(tmp_path / "list.json", '[{"a": 1}]')], ["a"])
    assert "not a .parquet" in error_of([jsonl(tmp_path / "data.csv", "a\n1\n")], ["a"])


@pytest.mark.parametrize(
    "value",
    ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "1" * 5000],
    ids=["lists", "objects", "digits"],
)
def test_json_that_python_cannot_hold_is_named(value: str, tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "a.jsonl", f'{{"a": 1}}\n{{"a": {value}}}\n')
    assert error_of([lines], ["a"]).startswith(f"{lines}, line 2: cannot be read: ")


def test_rows_of_a_json_file_are_as_they_are_written(tmp_path: Path) -> None:
    """In a table all rows of a column would have one type, and columns and fields those of the first row or of all."""
    written = [
        {"a": "x", "truth": {"value": 18}},
        {"a": 2, "truth": {"value": 0.5, "more": [1, "b"]}, "extra": {"q": 1}, "name": "loop"},
        {"a": None, "truth": None},
    ]
    rows = Rows([jsonl(tmp_path / "rows.jsonl", "\n\n".join(map(json.dumps, written)))], ["a", "truth.value"], ["extra"])
    assert [rows[i] for i in range(3)] == [{"extra": None, "name": None} | row for row in written]
    assert [*map(repr, rows.column("truth.value"))] == ["18", "0.5", "None"] and rows.column("truth.more") == [
        None,
        [1, "b"],
        None,
    ]
    assert rows.column("name") == [None, "loop", None] and rows.column("other") == [None] * 3


def test_errors_name_the_fields_of_all_rows_of_a_json_file(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", '{"a": null, "b": {"c": 1}}\n{"a": 1, "b": {"d": {"e": 1}}}\n')
    assert error_of([file], ["x"]) == f"{file}: no column 'x'; it has a, b"
    assert error_of([file], ["b.x"]) == f"{file}: column 'b' has no field 'x'; it has c, d"
    assert error_of([file], ["b.c.x"]) == f"{file}: column 'b.c' has no field 'x'; it has none (int)"
    assert len(Rows([file], ["b.d.e"])) == 2
    mixed = jsonl(tmp_path / "mixed.jsonl", '{"b": null, "extra_info": {}}\n{"b": {"c": 1}, "extra_info": "x"}\n')
    assert len(Rows([mixed], ["b.c"])) == 2
    assert check_file(mixed, ["b.c"]) is None, "the first row has null, others may have objects"
    nulls = parquet(tmp_path / "nulls.parquet", [{"b": None}])
    for refused in (lambda: check_file(nulls, ["b.c"]), lambda: Rows([nulls], ["b.c"])):
        with pytest.raises(ValueError, match=r"column 'b' has no field 'c'; it has none \(null\)"):
            refused()
    late = jsonl(tmp_path / "late.jsonl", '{"a": null}\n{"a": 1}\n')
    assert error_of([late], ["a.c"]) == f"{late}, row 1: a is a int; it must be an object or null"
    with pytest.raises(ValueError, match=r"mixed\.jsonl, row 1: extra_info is a str; it must be an object or null"):
        Rows([mixed], ["b.c"], ["extra_info"])
    with pytest.raises(ValueError, match=r"text\.jsonl, row 0: b is a str"):
        Rows([jsonl(tmp_path / "text.jsonl", '{"b": "x"}\n{"b": {"c": 1}}\n')], ["b.c"])


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
@pytest.mark.parametrize(
    "values",
    [pa.array(["{}", None]), pa.array([None, '{"a": 1}'], pa.large_string()), pa.array([[1], []]), pa.array([3, None])],
    ids=["text", "large_text", "lists", "numbers"],
)
def test_structs_of_scorers_that_are_none_are_refused(column: str, values: pa.Array, tmp_path: Path) -> None:
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1, 2], column: values}), file)
    for check in (lambda: Rows([file], ["a"], [column]), lambda: check_file(file, ["a"], structs=[column])):
        with pytest.raises(ValueError) as error:
            check()
        where, kind = f"{file}: column {column!r} is ", str(values.type).partition("<")[0]
        assert str(error.value).startswith(where + kind) and str(error.value).endswith(
            "; it must be a struct (an object) or null"
        )
    assert len(Rows([file], ["a"])) == check_file(file, ["a"]) == 2, "a column that is not read may be of any type"
    assert Rows([file], ["a"], [column], structs=()).column(column) == values.to_pylist(), "or that nothing takes apart"
    lines = jsonl(tmp_path / "a.jsonl", "".join(json.dumps({"a": 1, column: value}) + "\n" for value in values.to_pylist()))
    with pytest.raises(ValueError, match=rf"a\.jsonl, row \d: {column} is a \w+; it must be an object or null"):
        Rows([lines], ["a"], [column])
    if values[0].is_valid:
        with pytest.raises(ValueError, match=rf"a\.jsonl: column '{column}' is \w+; it must be a struct"):
            check_file(lines, ["a"], structs=[column])


@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.list_(pa.int64()), pa.struct({"a": pa.int64()})], ids=str)
def test_structs_of_scorers_may_be_null_in_every_row(kind: pa.DataType, tmp_path: Path) -> None:
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1, 2], "extra_info": pa.array([None, None], kind)}), file)
    assert Rows([file], ["a"], ["extra_info"])[1] == {"a": 2, "extra_info": None}
    assert check_file(file, ["a"], structs=["extra_info"]) == 2


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_distinct_labels_of_a_column(kind: pa.DataType, tmp_path: Path) -> None:
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"s": pa.array(["b", None, "a", "b"]).cast(kind)}), file)
    assert distinct_labels(file, "s") == {"", "a", "b"}


def test_a_column_of_texts_has_nothing_else(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [{"s": value} for value in (None, ["a"])])
    with pytest.raises(ValueError) as error:
        distinct_labels(file, "s")
    assert str(error.value) == f"{file}, row 1: s is ['a'], a list; it must be a text or null"
