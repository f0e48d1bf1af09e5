"""Reading from the hub: a local one, through huggingface_hub itself."""

import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from data_preprocess import gsm8k, math_dataset, source
from tests.hub import FakeHub, fake_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    with fake_hub(tmp_path / "cache", monkeypatch) as hub:
        yield hub


def parquet(*examples: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(examples)), file)
    return file.getvalue()


def publish_gsm8k(hub: FakeHub) -> None:
    hub.datasets["openai/gsm8k"] = {
        "README.md": b"about",
        "main/train-00000-of-00002.parquet": parquet({"question": "a", "answer": "#### 1"}),
        "main/train-00001-of-00002.parquet": parquet({"question": "b", "answer": "#### 2"}),
        "main/test-00000-of-00001.parquet": parquet({"question": "c", "answer": "#### 3"}),
        "socratic/train-00000-of-00001.parquet": parquet({"question": "d", "answer": "#### 4"}),
    }


def questions(folder: Path) -> dict[str, list[str]]:
    files = {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    return {split: [row["extra_info"]["question"] for row in rows] for split, rows in files.items()}


def error_of(tmp_path: Path) -> str:
    with pytest.raises(SystemExit) as error:
        gsm8k.main(["--local_save_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and "\n" not in str(error.value)
    return str(error.value)


def test_hub_dataset_is_read_without_the_datasets_package(tmp_path: Path, hub: FakeHub) -> None:
    publish_gsm8k(hub)
    gsm8k.main(["--local_save_dir", str(tmp_path / "out")])
    assert questions(tmp_path / "out") == {"train": ["a", "b"], "test": ["c"]}
    fetched = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /datasets/")}
    assert len(fetched) == 3 and not any("socratic" in request for request in hub.requests), "other configurations stay there"


def test_default_configuration_is_read_from_its_folder(tmp_path: Path, hub: FakeHub) -> None:
    row = {"problem": "p", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{7}$"}
    hub.datasets["DigitalLearningGmbH/MATH-lighteval"] = {
        f"{folder}/{split}-00000-of-00001.parquet": parquet(row) for folder in ("data", "algebra") for split in ("train", "test")
    }
    math_dataset.main(["--local_save_dir", str(tmp_path / "out")])
    assert len(pq.read_table(tmp_path / "out" / "test.parquet")) == 1
    for path, content in hub.datasets["DigitalLearningGmbH/MATH-lighteval"].items():
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(content)
    math_dataset.main(["--local_dataset_path", str(tmp_path / "copy"), "--local_save_dir", str(tmp_path / "local")])
    assert len(pq.read_table(tmp_path / "local" / "train.parquet")) == 1


def test_unreachable_hub_is_one_line_within_seconds_and_its_cache_is_read(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_gsm8k(hub)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    began = time.monotonic()
    assert error_of(tmp_path) == (
        "error: openai/gsm8k cannot be loaded from the hub (it is not in the cache, and no connection to 127.0.0.1: "
        "[Errno 111] Connection refused); pass a local copy: --local_dataset_path"
    )
    assert time.monotonic() - began < 10
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    gsm8k.main(["--local_save_dir", str(tmp_path / "first")])
    hub.requests.clear()
    # As behind a firewall, where each request of huggingface_hub would wait for its own timeout.
    monkeypatch.setattr(source, "hub_unreachable", lambda: "no connection")
    gsm8k.main(["--local_save_dir", str(tmp_path / "second")])
    assert questions(tmp_path / "second") == questions(tmp_path / "first") and hub.requests == []


def test_dataset_that_the_hub_does_not_have_is_one_line(tmp_path: Path, hub: FakeHub) -> None:
    message = error_of(tmp_path)
    assert message.startswith("error: openai/gsm8k cannot be loaded from the hub (404 Client Error") and "Retry" not in message


def test_hub_dataset_without_the_files_is_one_line(tmp_path: Path, hub: FakeHub) -> None:
    hub.datasets["openai/gsm8k"] = {"data.csv": b"a,b"}
    assert error_of(tmp_path) == (
        "error: openai/gsm8k on the hub: expected files train*.jsonl or train*.parquet, and test*; found none"
    )


def test_offline_mode_is_one_line(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in error_of(tmp_path) and hub.requests == []
