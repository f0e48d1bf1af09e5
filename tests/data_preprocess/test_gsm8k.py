import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_preprocess import gsm8k

EXAMPLES = [
    {"question": "Ada has 3 hens. Each lays 400 eggs. How many eggs?", "answer": "<<3*400=1200>>1,200 eggs.\n#### 1,200"},
    {"question": "Ben owes $5. What does he have?", "answer": "He has minus five.\n#### -5"},
]
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def lines(path: Path, examples: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


def test_rows_have_verls_columns(tmp_path: Path) -> None:
    lines(tmp_path / "raw" / "train.jsonl", EXAMPLES)
    lines(tmp_path / "raw" / "test.jsonl", EXAMPLES[1:])
    gsm8k.main(["--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out")])
    train, test = (pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert train[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{EXAMPLES[0]['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": EXAMPLES[0]["answer"],
            "question": EXAMPLES[0]["question"],
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1200"}}},
        },
    }
    assert [row["reward_model"]["ground_truth"] for row in train] == ["1200", "-5"]
    assert [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in test] == [("test", 0)]


def test_sources_of_every_kind_give_the_same(tmp_path: Path) -> None:
    """A file, a parquet directory, a copy of the hub's tree (with a second configuration besides `main`), and the older flag."""
    lines(tmp_path / "jsonl" / "train.jsonl", EXAMPLES)
    for part, examples in (("main", EXAMPLES), ("socratic", EXAMPLES * 2)):
        (tmp_path / "hub" / part).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(examples), tmp_path / "hub" / part / "train-00000-of-00001.parquet")
    sources = [tmp_path / "jsonl" / "train.jsonl", tmp_path / "jsonl", tmp_path / "hub", tmp_path / "hub" / "main"]
    tables = []
    for i, source in enumerate(sources):
        flag = "--local_dir" if i % 2 else "--local_save_dir"
        gsm8k.main(["--local_dataset_path", str(source), flag, str(tmp_path / f"out{i}")])
        assert [file.name for file in (tmp_path / f"out{i}").iterdir()] == ["train.parquet"]
        tables.append(pq.read_table(tmp_path / f"out{i}" / "train.parquet"))
    assert all(table.equals(tables[0]) for table in tables) and len(tables[0]) == 2


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("train.jsonl", '{"question": "q", "answer": "no number"}\n', "train row 0: the answer has no number after ####"),
        ("train.jsonl", '{"problem": "q", "answer": "#### 1"}\n', "train row 0 has no field 'question'; it has problem, answer"),
        ("train.jsonl", '{"question": null, "answer": "#### 1"}\n', "train row 0: question is None; it must be a text"),
        ("train.jsonl", '{"question": "q", "answer": null}\n', "train row 0: answer is None; it must be a text"),
        ("train.jsonl", '{"question": "q", "answer": 4}\n', "train row 0: answer is 4; it must be a text"),
        ("train.jsonl", '{"question": \n', "line 1: not JSON"),
        ("train.jsonl", "\udce9", "train.jsonl: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 0"),
        ("train.parquet", "PAR1", "train.parquet: cannot be read: "),
        ("data.jsonl", "{}\n", "found data.jsonl"),
        ("train.csv", "a\n", "found none"),
    ],
)
def test_bad_data_is_one_line_and_writes_nothing(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit) as error:
        gsm8k.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    message = str(error.value)
    assert message.startswith("error: ") and expected in message and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_missing_path_raises(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file or directory"):
        gsm8k.main(["--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path)])
