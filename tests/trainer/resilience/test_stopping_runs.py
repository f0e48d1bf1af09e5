"""Runs with slow rewards at a terminal: what SIGTERM waits for, and how many rewards are late."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from configs.base.keys import CONFIG_DIR
from tests.runs import make_task, ppo_arguments
from tests.terminal import Terminal


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def start(task: Path, folder: Path, reward: str, *overrides: str) -> Terminal:
    (folder / "own.py").write_text(reward)
    words = ppo_arguments(task, folder / "run", "trainer.logger=[console]", *overrides)
    words += [f"reward.custom_reward_function.path={folder / 'own.py'}"]
    environment = os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)}
    return Terminal([sys.executable, "-m", "trainer.main_ppo", *words], cwd=folder, env=environment)


@pytest.mark.parametrize("logger", ["[console]", "[]"])
def test_sigterm_is_acknowledged_at_once_with_what_it_waits_for(task: Path, tmp_path: Path, logger: str) -> None:
    """With a panel and without: file descriptor 2 is the libraries' log then, and the panel would paint over the line."""
    slow = "import time\ndef compute_score(**answer):\n    open('scoring', 'w')\n    time.sleep(60)\n"
    terminal = start(task, tmp_path, slow, "reward.num_workers=1", f"trainer.logger={logger}")
    while not (tmp_path / "scoring").exists():
        time.sleep(0.05)
    began = time.monotonic()
    os.kill(terminal.process.pid, signal.SIGTERM)
    terminal.read(until="is dropped")
    assert time.monotonic() - began < 2.0
    text = " ".join(terminal.text.split())  # the terminal's width wraps it
    assert "SIGTERM: the run ends after this step, with a checkpoint; a second SIGTERM ends it now; " in text
    assert "; it waits for scoring, 5 s at most: then the step is dropped" in text
    assert terminal.end() == 143 and time.monotonic() - began < 15.0
    assert "resumes from" in terminal.text.rpartition("stopped after step 0: SIGTERM")[2]


def test_scoring_line_counts_late_rewards(task: Path, tmp_path: Path) -> None:
    slow = "import time\ndef compute_score(**answer):\n    time.sleep(3)\n"
    terminal = start(task, tmp_path, slow, "reward.num_workers=2", "reward.timeout=0.5")
    terminal.read(until="of 32 answers, 2 late")
    assert re.search(r"scoring \d+\.\d s · \d+ of 32 answers, 2 late", terminal.text)
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
