import json
from pathlib import Path

import pytest

from scripts.bench.suite import PARTS, ROOT, Figure, Part, run, run_bench

FAKES = {
    "good": "import json; print('a word before it'); print(json.dumps({'seconds': 0.5, 'times': 3.0}))",
    "table": "print('| a | b |\\n|---|---|\\n| 1 | 2.5 |')",
    "broken": "import sys; print('half', file=sys.stderr); sys.exit('no such model')",
    "late": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "silent": "import json; print(json.dumps({'minutes': 1}))",
}


def fake(name: str, **figures: Figure) -> Part:
    return Part(f"fake_{name}", (), (), 1.0 if name == "late" else 30.0, figures)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    for name, program in FAKES.items():
        (tmp_path / "scripts" / "bench" / f"fake_{name}.py").write_text(program)
    return tmp_path


def test_figures_are_written_to_table_json_and_plot(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, times = Figure(lambda report: report["seconds"], 1.0), Figure(lambda report: report["times"], 4.0, "higher")
    parts = {
        "good": fake("good", seconds=seconds, times=times),
        "table": fake("table", b=Figure(lambda report: float(report[0]["b"]))),
    }
    assert run(parts, quick=False, plot=tree / "plot.svg", root=tree) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)["parts"]
    assert result["good"]["figures"] == {"seconds": 0.5, "times": 3.0} and result["table"]["figures"] == {"b": 2.5}
    lines = {line.split("|")[2].strip(): line for line in output.err.splitlines()[2:]}
    assert "missed" in lines["times"] and ">= 4" in lines["times"]
    assert "missed" not in lines["seconds"] and "missed" not in lines["b"]
    assert "<svg" in (tree / "plot.svg").read_text()


def test_failed_late_and_incomplete_parts_are_reported(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = Figure(lambda report: report["seconds"])
    parts = {name: fake(name, seconds=seconds) for name in ("broken", "late", "silent", "good")}
    assert run(parts, quick=False, root=tree) == 1
    output = capsys.readouterr()
    errors = {name: result["error"] for name, result in json.loads(output.out)["parts"].items()}
    assert errors == {
        "broken": "RuntimeError: exit code 1: no such model",
        "late": "RuntimeError: not done after 1 s",
        "silent": "KeyError: 'seconds'",
        "good": None,
    }
    assert output.err.count("FAILED") == 3 and "no such model" in output.err


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PARTS if name != "dispatch"])
def test_smoke_version_of_each_part_has_its_figures(name: str) -> None:
    part = PARTS[name]
    report = run_bench(part, part.quick, ROOT)
    assert all(0 <= figure.of(report) < 1e9 for figure in part.figures.values())
