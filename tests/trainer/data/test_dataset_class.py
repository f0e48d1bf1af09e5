"""Data set classes in verl's form become prompts."""

import importlib.util
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema.ppo import CustomDatasetConfig
from tests.trainer.data.tokenizers import byte_tokenizer, data_config
from trainer.data.dataset import PromptDataset

TOKENIZER = byte_tokenizer()
# In ReTool's form: directories of parquet files, columns of two kinds, and an overridden reader.
READER = """
import pyarrow.parquet as pq

from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.rl_dataset import RLHFDataset as Same

assert RLHFDataset is Same
SUFFIX = " Box it."


def competition(row, data_source):
    prompt = [{"role": "user", "content": row["Problem"] + SUFFIX}]
    return {"data_source": data_source, "prompt": prompt, "ability": "MATH", "reward_model": {"ground_truth": str(row["Answer"])},
            "agent_name": "tool_agent"}


class Mixed(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.dataframe = []
        for folder in self.data_files:
            for row in pq.read_table(folder).to_pylist():
                if "Problem" in row:
                    row = competition(row, folder.rpartition("/")[2])
                else:
                    row["prompt"][0]["content"] += SUFFIX
                self.dataframe.append(row)
"""
WITH_DATASETS = """
import datasets

from verl.utils.dataset import RLHFDataset


def competition(row, *, data_source=None):
    prompt = [{"role": "user", "content": row["Problem"] + " Box it."}]
    return {"data_source": data_source, "prompt": prompt, "ability": "MATH", "reward_model": {"ground_truth": str(row["Answer"])},
            "agent_name": "tool_agent"}


def asked(row):
    row["prompt"][0]["content"] += " Box it."
    return row


class Mixed(RLHFDataset):
    def _read_files_and_tokenize(self):
        parts = []
        for folder in self.data_files:
            part, name = datasets.load_dataset(folder)["train"], folder.rpartition("/")[2]
            if "Problem" in part.column_names:
                part = part.map(competition, fn_kwargs={"data_source": name}, remove_columns=part.column_names)
            else:
                part = part.map(asked, num_proc=2)
            parts.append(part)
        self.dataframe = datasets.concatenate_datasets(parts)


class Plain(RLHFDataset):
    pass
"""
OTHERS = """
from verl.utils.dataset import RLHFDataset


class Kwargs(RLHFDataset):
    def _read_files_and_tokenize(self):
        extra = [{"tools_kwargs": {"t": {"a": i}}, "index": 7} for i in range(3)]
        self.dataframe = [
            dict(prompt=None, chat=f"Say {i}", reward_model=dict(ground_truth=i), data_source="s", extra_info=extra[i])
                          for i in range(3)]

    def _build_messages(self, example, key=None):
        return [{"role": "user", "content": example["chat"]}]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        assert row["index"] == 7 and row["tools_kwargs"] == {"t": {"a": item}}
        return row | {"interaction_kwargs": {"name": "x"}}


class Empty(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.dataframe = []


class Unscored(Kwargs):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        del row["reward_model"]
        return row


class Failing(RLHFDataset):
    def _read_files_and_tokenize(self):
        raise RuntimeError(self.config.prompt_key)


class Later(RLHFDataset):
    def _read_files_and_tokenize(self):
        import verl.utils.fs
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Directories as of data sets of the hub."""
    math = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": str(i)},
        }
        for i in range(4)
    ]
    for name, rows in (("math", math), ("aime", [{"ID": "a", "Problem": "p", "Answer": 3}])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "train.parquet")
    return [str(tmp_path / "math"), str(tmp_path / "aime")]


def read(folder: Path, text: str, name: str, files: list[str], **changes: Any) -> PromptDataset:
    file = folder / "own.py"
    file.write_text(dedent(text))
    config = data_config(custom_cls=CustomDatasetConfig(path=str(file), name=name), **changes)
    return PromptDataset(files, TOKENIZER, config, max_samples=changes.get("train_max_samples", -1), seed=0)


@pytest.mark.parametrize(
    "text",
    [
        READER,
        pytest.param(WITH_DATASETS, marks=pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="needs datasets")),
    ],
    ids=["own_reader", "datasets"],
)
def test_a_class_in_the_form_of_retool_makes_the_prompts(text: str, folders: list[str], tmp_path: Path) -> None:
    data = read(tmp_path, text, "Mixed", folders)
    assert len(data) == data.n_rows == 5 and data.data_sources == {"math_dapo", "aime"}
    assert [data[i].text for i in (0, 4)] == ["<user>0? Box it.<a>", "<user>p Box it.<a>"]
    assert [(data[i].ground_truth, data[i].agent, data[i].uid) for i in (3, 4)] == [("3", None, 3), ("3", "tool_agent", 4)]
    assert data[0].messages == [{"role": "user", "content": "0? Box it."}] and data[0].extra_info["index"] == "0"
    assert len(read(tmp_path, text, "Mixed", folders, train_max_samples=2, shuffle=False)) == 2
    dropped = read(tmp_path, text, "Mixed", folders, max_prompt_length=len("<user>p Box it.<a>"), filter_overlong_prompts=True)
    assert [prompt.uid for prompt in (dropped[i] for i in range(len(dropped)))] == [4]


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="needs datasets")
def test_a_class_that_overrides_nothing_reads_the_files(folders: list[str], tmp_path: Path) -> None:
    data = read(tmp_path, WITH_DATASETS, "Plain", [f"{folders[0]}/train.parquet"])
    assert [data[i].text for i in range(len(data))] == [f"<user>{i}?<a>" for i in range(4)]


def test_methods_of_the_class_decide_messages_and_arguments_of_tools(tmp_path: Path) -> None:
    data = read(tmp_path, OTHERS, "Kwargs", ["absent"])
    assert data[1].messages == [{"role": "user", "content": "Say 1"}] and data[1].ground_truth == 1
    assert data[1].extra_info == {"tools_kwargs": {"t": {"a": 1}}, "interaction_kwargs": {"name": "x"}, "index": 7}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", "no class Absent; it has .*Kwargs, Empty"),
        ("Empty", "it has no rows; check what it reads from some/files"),
        ("Unscored", "row 0 has no reward_model.ground_truth; its columns are prompt, chat, data_source"),
        ("Failing", r"its rows cannot be read: RuntimeError: prompt \(own.py:"),
        ("Later", "No module named 'verl'.*; verl is not installed, and without it there are verl.tools.schemas"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, OTHERS, name, ["some/files"])
    assert str(caught.value).startswith("data.custom_cls.") and "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_the_extra_that_a_class_needs_is_named(folders: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No module named 'datasets' .*; run: pip install 'tandem\[hub\]'"):
        read(tmp_path, WITH_DATASETS, "Mixed", folders)
