"""The console script in a directory with folders of the user's that have the names of this package's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments

# What pip writes into bin/tandem-ppo. As there, the working directory is not on sys.path: -P.
TANDEM_PPO = [sys.executable, "-P", "-c", "import sys; from trainer.main_ppo import main; sys.exit(main())"]
REWARD = """
import json, os, sys

import trainer, workers

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps([trainer.__file__, workers.__file__, sys.path]) + "\\n")
    return solution_str.count("7") / 8
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory in which `trainer`, `workers` and `configs` are packages that end the program that imports them."""
    for name in ("trainer", "workers", "configs"):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the user')\n")
    return tmp_path / "own"


def run(command: list[str], own: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SEEN": str(own / "seen")}
    return subprocess.run([*command, *argv], cwd=own, env=environment, capture_output=True, text=True, timeout=200)


def test_console_script_trains_with_ray_next_to_own_folders(own: Path) -> None:
    task = make_task(own.parent / "task")
    (task / "reward.py").write_text(REWARD)
    arguments = ppo_arguments(task, own / "run", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "reward.num_workers=1")
    result = run(TANDEM_PPO, own, *arguments)
    assert result.returncode == 0, result.stderr
    assert metrics_of(own / "run")[-1]["training/global_step"] == 2
    seen = {line: json.loads(line) for line in (own / "seen").read_text().splitlines()}.values()
    assert {tuple(files) for *files, _ in seen} == {(f"{ROOT}/trainer/__init__.py", f"{ROOT}/workers/__init__.py")}
    assert all(str(own) not in path and "" not in path for *_, path in seen), "not on the path of reward processes"


def test_python_m_finds_the_own_folder_and_safe_path_does_not(own: Path) -> None:
    words = ["recipe=quickstart", "trainer.dry_run=config"]
    assert "the trainer of the user" in run([sys.executable, "-m", "trainer.main_ppo"], own, *words).stderr
    (own / "trainer" / "__init__.py").write_text("")
    result = run([sys.executable, "-m", "trainer.main_ppo"], own, *words)
    assert result.returncode == 1 and result.stderr.endswith("No module named trainer.main_ppo\n")
    for command in (
        [sys.executable, "-P", "-m", "trainer.main_ppo"],
        ["env", "PYTHONSAFEPATH=1", sys.executable, "-m", "trainer.main_ppo"],
    ):
        result = run(command, own, *words)
        assert result.returncode == 0 and result.stdout.startswith("configuration is fine"), result.stderr
