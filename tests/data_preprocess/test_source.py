"""Reading from the hub, with a stub of the optional package `datasets`."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_preprocess import gsm8k, math_dataset, source


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of the stub package, to which a test writes load_dataset."""
    package = tmp_path / "packages" / "datasets.py"
    package.parent.mkdir()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    yield package
    sys.modules.pop("datasets", None)


def error_of(tmp_path: Path) -> str:
    with pytest.raises(SystemExit) as error:
        gsm8k.main(["--local_save_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and "\n" not in str(error.value)
    return str(error.value)


def test_missing_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    assert "pip install datasets" in error_of(tmp_path) and "--local_dataset_path" in error_of(tmp_path)


def test_unreachable_hub_raises(tmp_path: Path, datasets: Path) -> None:
    datasets.write_text("def load_dataset(name, config):\n    raise ConnectionError(f\"Couldn't reach\\n'{name}' on the Hub\")\n")
    assert "openai/gsm8k cannot be loaded from the hub (Couldn't reach 'openai/gsm8k' on the Hub)" in error_of(tmp_path)


def test_from_the_hub(tmp_path: Path, datasets: Path) -> None:
    datasets.write_text(
        "def load_dataset(name, config):\n"
        "    assert (name, config) == ('openai/gsm8k', 'main')\n"
        "    return {split: [{'question': split, 'answer': '#### 7'}] for split in ('train', 'test')}\n"
    )
    gsm8k.main(["--local_save_dir", str(tmp_path / "out")])
    rows = [pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()[0] for split in ("train", "test")]
    assert [row["extra_info"]["question"] for row in rows] == ["train", "test"]


def test_math_from_the_hub(tmp_path: Path, datasets: Path) -> None:
    datasets.write_text(
        "def load_dataset(name, config):\n"
        "    assert (name, config) == ('DigitalLearningGmbH/MATH-lighteval', None)\n"
        "    row = {'problem': 'p', 'level': 'Level 1', 'type': 'Algebra', 'solution': '$\\\\boxed{7}$'}\n"
        "    return {'train': [row], 'test': [row]}\n"
    )
    math_dataset.main(["--local_save_dir", str(tmp_path / "out")])
    assert len(pq.read_table(tmp_path / "out" / "test.parquet")) == 1
