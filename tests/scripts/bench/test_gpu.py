"""Rows of the GPU benches on fake benches: which GPU each sees, what the table says, what the page keeps."""

import json
from pathlib import Path

import pytest

from scripts.bench import gpu
from scripts.bench.gpu import BEGIN, END, Row, cells, publish, run, table
from scripts.bench.suite import Figure, Part
from scripts.gpu.driver import Gpu

FAKES = {
    "one": "import json, os, time; time.sleep(0.3);"
    "print(json.dumps({'seconds': 2.0, 'gpu': int(os.environ['CUDA_VISIBLE_DEVICES'])}))",
    "all": "import json, os; print(json.dumps({'seconds': 3.0, 'gpu': os.environ.get('CUDA_VISIBLE_DEVICES', '')}))",
    "broken": "import sys; sys.exit('no such model')",
}
WHERE = {"gpu": "NVIDIA H100", "commit": "0123456789"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    for name, program in FAKES.items():
        (tmp_path / "scripts" / "bench" / f"fake_{name}.py").write_text(program)
    return tmp_path


def row(name: str, gpus: int = 1, **figures: Figure) -> Row:
    return Row(
        about=f"a row {name}", part=Part(f"fake_{name}", (), (), 30.0, figures), gpus=gpus,
        limits={"s": lambda report: report["seconds"] / 2}, rivals={"s": "9 (another)"},
    )  # fmt: skip


def test_rows_of_one_gpu_run_side_by_side_and_the_others_see_all(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, seen = Figure(lambda report: report["seconds"], 1.0), Figure(lambda report: report["gpu"])
    chosen = {f"one-{i}": row("one", s=seconds, gpu=seen) for i in range(4)}
    chosen |= {"broken": row("broken"), "all": row("all", -1, s=seconds, gpu=Figure(lambda report: len(report["gpu"])))}
    assert run(chosen, 2, WHERE, tree, quick=False, root=tree) == 1
    records = json.loads((tree / "results.json").read_text())
    assert [record["row"] for record in records][-1] == "all" and records[-1]["gpus"] == 2
    assert records[-1]["figures"]["gpu"]["value"] == 0
    assert {record["figures"]["gpu"]["value"] for record in records if record["row"].startswith("one")} == {0, 1}
    assert {record["row"]: record["error"] for record in records}["broken"] == "RuntimeError: exit code 1: no such model"
    assert "2 (missed) | <= 1 | 1 | 9 (another) | 1 x NVIDIA H100" in capsys.readouterr().out


def test_the_page_shows_the_latest_and_keeps_all(tree: Path) -> None:
    page = tree / "page.md"
    page.write_text(f"Before.\n{BEGIN}{END}\nAfter.\n")
    figure = {"value": 5.0, "goal": 4.0, "better": "higher", "limit": None, "rival": None}
    old = {"row": "step", "about": "a step", "figures": {"s": figure}, "error": None, "gpus": 1, "date": "2026-11-26", **WHERE}
    new = old | {"date": "2026-11-27", "figures": {"s": figure | {"value": 3.0}}}
    for number, records in enumerate([[new], [old, old | {"error": "it failed", "date": "2026-11-28"}], [new]]):
        (tree / f"{number}.json").write_text(json.dumps(records))
        publish([str(tree / f"{number}.json"), "--docs", str(page)])
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n")
    assert "3 (missed) | >= 4" in text and "| 5 |" not in text
    assert [record["date"] for record in json.loads(page.with_suffix(".json").read_text())] == ["2026-11-26", "2026-11-27"]
    assert cells([old])[0] in table([old | {"gpus": 2}, old])


def test_rows_depend_on_the_machine() -> None:
    small, large = Gpu("NVIDIA H100", 85 * 10**9), Gpu("NVIDIA H200", 150 * 10**9)
    assert "6144" in gpu.rows([small])["train-7b"].part.words and "8192" in gpu.rows([large])["train-7b"].part.words
    assert "scaling-1.5b" not in gpu.rows([small]) and "fsdp4" in gpu.rows([large] * 4)["scaling-1.5b"].part.words


def test_nan_is_no_missed_goal_where_no_peak_is_known() -> None:
    report = {"cases": {"one": {"parts": {"update": {"of_peak": None, "of_gemm": 0.5}}}}}
    assert gpu.of_peak("update")(report) != gpu.of_peak("update")(report)
    report["cases"]["one"]["parts"]["update"] |= {"of_peak": 0.3}
    assert gpu.of_peak("update")(report) == 30.0 and gpu.products("update")(report) == pytest.approx(60.0)
