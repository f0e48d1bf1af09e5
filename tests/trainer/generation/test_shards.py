from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from trainer.generation.shards import CONTENT, SCORED, Shards, check_same, shard_files, write_rows

ROW: dict[str, Any] = {
    "uid": 3,
    "prompt": [{"role": "user", "content": "1+1="}],
    "prompt_length": 4,
    "responses": ["2", "ü"],
    "log_probs": [-0.1, -1e-17],
    "scores": [1.0, None],
}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_rows_round_trip(form: Any, tmp_path: Path) -> None:
    shards = Shards(tmp_path / "new/answers", form, 3, {"n": 2})
    assert shards.missing() == [0, 1, 2]
    write_rows(shards.path(2), [ROW])
    write_rows(shards.path(0), [ROW, ROW | {"uid": 4}])
    assert shards.missing() == [1]
    write_rows(shards.path(1), [ROW | {"uid": 5, "scores": [None, None]}])
    assert [row["uid"] for row in shards.rows()] == [3, 4, 5, 3] and next(shards.rows()) == ROW
    assert sorted(path.name for path in shards.directory.iterdir()) == [
        "manifest.json", *(f"shard_0000{i}.{form}" for i in range(3))
    ]  # fmt: skip


def test_shards_have_the_same_columns_with_nulls(tmp_path: Path) -> None:
    for name, scores in (("a", [None, None]), ("b", [0.5, 1.0])):
        write_rows(tmp_path / f"{name}.parquet", [ROW | {"scores": scores}])
    assert pq.read_schema(tmp_path / "a.parquet") == pq.read_schema(tmp_path / "b.parquet")


def test_objects_without_fields_are_null_in_parquet(tmp_path: Path) -> None:
    """Parquet has no type for them; files of tasks with interactions have them."""
    call = {"function": {"name": "now", "arguments": {}}}
    row = ROW | {"prompt": [{"role": "assistant", "tool_calls": [call]}], "extra_info": {"index": 0, "interaction_kwargs": {}}}
    write_rows(tmp_path / "a.parquet", [row])
    (found,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert found["extra_info"] == {"index": 0, "interaction_kwargs": None} and found["responses"] == ROW["responses"]
    assert found["prompt"][0]["tool_calls"] == [{"function": {"name": "now", "arguments": None}}]


def test_a_number_beyond_64_bits_names_its_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'extra' cannot be parquet: .*too large.*; data.output_format=jsonl takes it"):
        write_rows(tmp_path / "a.parquet", [ROW | {"extra": {"a": 10**30}}])


def test_torn_shards_are_removed_and_others_kept(tmp_path: Path) -> None:
    first = Shards(tmp_path, "jsonl", 2, {"n": 2})
    write_rows(first.path(0), [ROW])
    (tmp_path / "shard_00001.jsonl.partial").write_text("{")
    again = Shards(tmp_path, "jsonl", 2, {"n": 2})
    assert again.missing() == [1] and shard_files(tmp_path) == [first.path(0)]
    assert not (tmp_path / "shard_00001.jsonl.partial").exists()


def test_failed_write_leaves_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard_00000.parquet"
    with pytest.raises(ValueError, match=r"column 'extra' cannot be parquet: .*; data.output_format=jsonl takes it"):
        write_rows(path, [ROW | {"extra": {"a": 1}}, ROW | {"extra": "text"}])
    assert not path.exists()


def test_shards_without_a_manifest_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "shard_00000.jsonl", [ROW])
    with pytest.raises(ValueError, match=r"has shard_00000.jsonl and no manifest.json: not from here"):
        Shards(tmp_path, "jsonl", 1, {"n": 2})


@pytest.mark.parametrize(
    ("new", "message"), [({"n": 3}, "n was 2 and is 3"), ({}, "n was 2 and is null"), ({"n": 2, "m": 1}, "m was")]
)
def test_first_different_key_is_reported(new: dict[str, Any], message: str) -> None:
    check_same(Path("x"), {"n": 2}, {"n": 2})
    with pytest.raises(ValueError, match=f"x has answers of another run: {message}"):
        check_same(Path("x"), {"n": 2}, new)


def test_scores_that_are_asked_for_later_are_reported_before_the_keys_of_the_reward() -> None:
    new = {"n": 2, "reward.timeout": 30.0, SCORED: True}
    with pytest.raises(ValueError, match=r"scored was false and is true \(selection\.score, or a file of selection\.\*\); put"):
        check_same(Path("x"), {"n": 2, SCORED: False}, new)


def test_content_is_compared_unless_an_earlier_version_wrote_the_manifest() -> None:
    key = f"model.path{CONTENT}"
    check_same(Path("x"), {"n": 2}, {"n": 2, key: "a"})
    with pytest.raises(ValueError, match=r"model.path .content. was .a. and is .b."):
        check_same(Path("x"), {key: "a"}, {key: "b"})
