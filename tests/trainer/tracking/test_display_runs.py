"""Complete runs at a terminal: one that ends, one that fails, and one that is interrupted."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.base.keys import CONFIG_DIR
from tests.runs import make_task, ppo_arguments
from tests.terminal import Terminal
from tests.warm import warm_python

pytestmark = pytest.mark.soak
NOISY = """
import logging, os, sys, time, warnings

def compute_score(data_source, solution_str, ground_truth, extra_info):
    warnings.warn("chatter by warnings")
    logging.getLogger("somebody.else").error("chatter by logging")
    print("chatter on stderr", file=sys.stderr)
    os.write(1, b"chatter of C code\\n")
    time.sleep(0.03)
    return len(solution_str)
"""
FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("no such digit")
"""
SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(5)
    return 1.0
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with warm_python(tmp_path_factory.mktemp("python")) as python:
        yield python


def start(python: str, task: Path, folder: Path, reward: str, *overrides: str) -> Terminal:
    (folder / "own.py").write_text(reward)
    words = ppo_arguments(task, folder / "run", "trainer.logger=[console]", *overrides)
    words += [f"reward.custom_reward_function.path={folder / 'own.py'}"]
    environment = os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)}
    return Terminal([python, "-m", "trainer.main_ppo", *words], cwd=folder, env=environment)


def test_finished_run_leaves_its_lines(python: str, task: Path, tmp_path: Path) -> None:
    terminal = start(python, task, tmp_path, NOISY, "trainer.total_training_steps=3")
    assert terminal.end() == 0
    text = terminal.text
    assert "quickstart · sort_digits" in text and "step 0/3" in text and re.search(r"step [12]/3 ━", text)
    assert text.startswith(f"starting, in {tmp_path}/run") and re.search(r"scoring \d\.\d s", text)
    assert re.search(r"reward [\d.]+ [▁▂▃▄▅▆▇█]", text) and re.search(r"length [\d.]+ [▁▂▃▄▅▆▇█]", text) and "memory" in text
    assert f"libraries write to {tmp_path}"[:60] in text
    after = text.rpartition("╯")[2]
    assert f"report: {tmp_path}/run/report.html" in after and "\x1b[?25h" in terminal.written.rpartition("╯")[2]
    assert [len(re.findall(rf"step {step}/3  score", text)) for step in (1, 2, 3)] == [1, 1, 1]
    assert "chatter" not in text
    log = (tmp_path / "run/logs/controller.log").read_text()
    for way in ("by warnings", "by logging", "on stderr", "of C code"):
        assert f"chatter {way}" in log, way


def test_error_is_printed_below_the_display(python: str, task: Path, tmp_path: Path) -> None:
    terminal = start(python, task, tmp_path, FAILING)
    assert terminal.end() == 2
    after = terminal.text.rpartition("╯")[2]
    assert "Traceback" not in after and "no such digit" in after and "rewards of the step failed" in after and "own.py:" in after
    assert "\x1b[?25h" in terminal.written.rpartition("╯")[2]


def test_interrupt_ends_the_display_and_the_run(python: str, task: Path, tmp_path: Path) -> None:
    terminal = start(python, task, tmp_path, SLOW)
    terminal.read(until="scoring")
    terminal.press("\x03")
    assert terminal.end() == 130
    after = terminal.text.rpartition("╯")[2]
    assert after.rstrip().endswith(
        "interrupted; with trainer.resume_mode=auto it resumes from the beginning: there is no checkpoint"
    )
    assert "Traceback" not in after and "^C" in terminal.text
    assert "\x1b[?25h" in terminal.written.rpartition("╯")[2]
