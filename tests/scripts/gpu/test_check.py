"""scripts/test_gpu.sh: rows on the CPU, failed and skipped rows, and the table of results."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.gpu.attempt import Attempt, Failed, Machine
from scripts.gpu.check import result_of, tidy
from scripts.gpu.driver import MARK, Gpu, end_all, started_by
from scripts.gpu.rows import BY_NAME, ROWS, Sizes
from scripts.gpu.table import main as write_table
from scripts.gpu.table import merged, table

ROOT = Path(__file__).parents[3]
HEALTHY = {"actor/grad_norm": 1.0, "training/rollout_log_probs_diff_mean": 0.001}


def machine(folder: Path, gpus: int = 2) -> Machine:
    for name in ("models", "runs"):
        (folder / name).mkdir(exist_ok=True)
    return Machine(out=folder, models=folder / "models", runs=folder / "runs", cpu=True, plan=False, gpus=(Gpu("CPU", 0),) * gpus)


def attempt(folder: Path, *lines: dict[str, Any]) -> Attempt:
    """Attempt at a row whose run has written these steps."""
    row = BY_NAME["quick-grpo"]
    found = Attempt(row, row.stages[0], machine(folder), folder / "log", {"phases": {}, "gpus": 1})
    found.run_dir.mkdir()
    text = "".join(json.dumps({"training/global_step": i} | line) + "\n" for i, line in enumerate(lines, 1))
    (found.run_dir / "metrics.jsonl").write_text(text)
    return found


def test_healthy_steps_pass(tmp_path: Path) -> None:
    found = attempt(tmp_path, HEALTHY, HEALTHY, HEALTHY)
    found.check_steps(found.run_dir, [], 3)
    assert found.record["mismatch"] == 0.001


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"actor/grad_norm": 0.0}, "did not learn"),
        ({"actor/skipped_updates": 1.0}, "did not learn"),
        ({"actor/pg_loss": "NaN"}, "not finite: actor/pg_loss"),
        ({"training/rollout_log_probs_diff_mean": 0.2}, "differ by 0.2000"),
        ({"training/global_step": 2}, r"steps \[1, 2, 2\]"),
    ],
)
def test_a_row_with_a_wrong_step_fails(tmp_path: Path, line: dict[str, Any], why: str) -> None:
    found = attempt(tmp_path, HEALTHY, HEALTHY, HEALTHY | line)
    with pytest.raises(Failed, match=why):
        found.check_steps(found.run_dir, [], 3)


def test_a_row_without_a_measured_mismatch_fails(tmp_path: Path) -> None:
    found = attempt(tmp_path, HEALTHY, {"actor/grad_norm": 1.0})
    with pytest.raises(Failed, match="no training/rollout_log_probs_diff_mean"):
        found.check_steps(found.run_dir, [], 2)


def test_a_row_whose_steps_ran_again_fails(tmp_path: Path) -> None:
    found = attempt(tmp_path, HEALTHY, HEALTHY)
    before = [(found.run_dir / "metrics.jsonl").read_text().splitlines()[0].replace("0.001", "0.002")]
    with pytest.raises(Failed, match="ran again"):
        found.check_steps(found.run_dir, before, 2)


def test_a_row_without_its_gpus_or_base_is_skipped(tmp_path: Path) -> None:
    row = BY_NAME["ulysses-4"]
    found = result_of(row, row.stages[0], machine(tmp_path), [])
    assert (found["result"], found["why"]) == ("skipped", "needs 4 GPUs, 2 are available")
    row, failed = BY_NAME["quick-kill-driver"], {"row": "quick-grpo", "stage": "run", "result": "failed"}
    found = result_of(row, row.stages[0], machine(tmp_path), [failed])
    assert (found["result"], found["why"][:21]) == ("skipped", "quick-grpo has failed")


def test_run_directory_is_kept_until_the_rows_that_resume_it_are_done(tmp_path: Path) -> None:
    here, row = machine(tmp_path), BY_NAME["quick-grpo"]
    (here.runs / "quick-grpo").mkdir()
    results = [{"row": "quick-grpo", "stage": "run", "result": "passed"}]
    tidy(row, here, results)
    assert (here.runs / "quick-grpo").exists()
    tidy(row, here, [*results, {"row": "quick-kill-driver", "stage": "kill", "result": "passed"}])
    assert not (here.runs / "quick-grpo").exists()


def test_all_processes_that_inherited_the_mark_are_ended(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {MARK: str(tmp_path)})
    while len(found := started_by(str(tmp_path))) < 2:
        time.sleep(0.05)
    assert len(end_all(str(tmp_path), 0.0)) == 2
    process.wait()
    assert not any(psutil.pid_exists(child.pid) and child.status() != psutil.STATUS_ZOMBIE for child in found)


def test_merged_table_keeps_the_latest_result_that_was_not_skipped() -> None:
    def record(date: str, result: str, row: str = "moe") -> dict[str, Any]:
        return {"row": row, "stage": "run", "gpus": 2, "date": date, "result": result}

    gone = record("2026-01-01 10:00", "passed") | {"stage": "removed"}
    several = [
        [gone],
        [record("2026-01-03 10:00", "skipped"), record("2026-01-01 10:00", "failed")],
        [record("2026-01-02 10:00", "passed")],
    ]
    assert [found["result"] for found in merged([*several, [record("2026-01-01 10:00", "passed", "grpo-7b-tp1")]])] == [
        "passed",
        "passed",
    ]


def test_page_keeps_its_results_and_takes_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs/gpu.md").read_text())
    before = json.loads((ROOT / "docs/gpu.json").read_text())
    assert table(before) in page.read_text(), "docs/gpu.json is what docs/gpu.md was made from"
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    new = before[0] | {"date": "2099-01-01", "peak_gb": 12.3, "log": "not kept"}
    (tmp_path / "results.json").write_text(json.dumps([new]))
    monkeypatch.setattr(sys, "argv", ["table", str(tmp_path / "results.json"), "--docs", str(page)])
    write_table()
    del new["log"]
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept == [new, *before[1:]] and table(kept) in page.read_text()


def test_rows_are_consistent() -> None:
    """Every training script has a row; bases exist and save a checkpoint; sizes also divide on the CPU."""
    scripts = {path.name for path in (ROOT / "scripts").glob("run_*.sh")} - {"run_rlhf_chain_cpu.sh"}
    assert scripts - {row.script for row in ROWS} == set()
    assert all(BY_NAME[row.base].saves for row in ROWS if row.base is not None)
    assert all(row.overrides == BY_NAME[row.base].overrides for row in ROWS if row.base and row.name.count("kill"))
    assert len(BY_NAME) == len(ROWS)
    assert Sizes(batch=16, mini=4, round=24).tiny() == Sizes(batch=4, mini=1, round=6, n=4, prompt=64, response=12)


def test_stages_with_the_same_command_share_a_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def forecast(attempt: Attempt, command: list[str], path: Path) -> dict[str, Any]:
        asked.append(attempt.row.name)
        return {"uses": [{"phase": "answers", "bytes": 3e9, "cached": 1e9}], "torch": "2.11"}

    monkeypatch.setattr(Attempt, "_forecast", forecast)
    here = machine(tmp_path)
    for name in ("placement-split", "megatron-pp2"):
        for stage in BY_NAME[name].stages:
            record: dict[str, Any] = {"gpus": 2}
            Attempt(BY_NAME[name], stage, here, tmp_path / f"{stage.name}.log", record).forecast()
            assert record["predicted_gb"] == 4.0 and name in record["command"]
    assert asked == ["placement-split", "megatron-pp2"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_row_runs_on_the_cpu_resumes_and_is_not_repeated(tmp_path: Path) -> None:
    command = ["scripts/test_gpu.sh", "--cpu", "--rows", "quick-grpo,quick-kill-driver", "--out", str(tmp_path)]
    hidden = tmp_path / "hidden"
    hidden.mkdir()  # hides the installed engines, whose imports are slow
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('vllm', 'sglang'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}{os.pathsep}{hidden}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(record["stage"], record["result"]) for record in results] == [("run", "passed"), ("kill", "passed")]
    assert all({"gen", "update_actor", "sync"} <= record["phases"].keys() and record["mismatch"] < 1e-3 for record in results)
    assert "save_checkpoint" in results[0]["phases"] and "| quick-kill-driver, kill [1] |" in (tmp_path / "table.md").read_text()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "quick-grpo, run: done before" in again.stdout
    assert started_by(str(tmp_path)) == []
