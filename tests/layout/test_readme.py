"""Commands in README.md and CONTRIBUTING.md are true: configurations compose, scripts and modules exist."""

import importlib.util
import re
import shlex
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path
from typing import get_args

import pytest

from configs.schema.common import AggMode
from tests.layout.source import ROOT
from trainer import (
    main_eval,
    main_export,
    main_generation,
    main_parity,
    main_ppo,
    main_reward_model,
    main_serve_reward,
    main_sft,
)  # fmt: skip
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.policy_losses import POLICY_LOSSES

KNOWN_PROGRAMS = {"git", "cd", "source", "ray"}


def commands(page: str) -> list[list[str]]:
    """The words of every command in the ```bash blocks of a page; continued lines are joined, comments dropped."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    return [words for line in split if (words := list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), line)))]


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = [(page, words) for page in ("README.md", "CONTRIBUTING.md") for words in commands(page)]
MODULES = (
    main_ppo, main_sft, main_reward_model, main_generation, main_eval, main_parity, main_export, main_serve_reward
)  # fmt: skip
PROGRAMS = {module.PROGRAM.name: module.PROGRAM for module in MODULES}
TRAINING = [words for _, words in COMMANDS if words[1:2] == ["-m"] and words[2] in PROGRAMS]


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_training_commands_compose(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PROGRAMS[words[2]]([*words[3:], "trainer.dry_run=config"]) == 0


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_programs_exist(page: str, words: list[str]) -> None:
    program = words[0]
    if program in {"python", ".venv/bin/python"}:
        assert words[1] == "-m" and importlib.util.find_spec(words[2]) is not None
    elif "/" in program:
        assert (ROOT / program).stat().st_mode & 0o111, f"{page}: {program} is not there, or not executable"
    else:
        assert program in KNOWN_PROGRAMS


def test_the_two_commands_are_there() -> None:
    assert ["scripts/quickstart.sh"] in [words for page, words in COMMANDS if page == "README.md"]
    assert TRAINING


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_prose_exist(page: str) -> None:
    paths = re.findall(r"`((?:configs|data_preprocess|docs|scripts|tests|trainer|workers)/[\w./-]*)`", (ROOT / page).read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_estimator_of_contributing_works() -> None:
    """Run in a process of its own: it registers a name."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    check = """
import torch
inputs = AdvantageInputs(
    token_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0]),
    response_mask=torch.tensor([0, 1, 0, 1, 1]),
    lengths=torch.tensor([2, 3]),
    prompt_lengths=torch.tensor([1, 1]),
    uid=torch.tensor([0, 1]),
)
assert ADVANTAGES["batch_mean"](inputs, None).advantages.tolist() == [0.0, -1.0, 0.0, 1.0, 1.0]
"""
    subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, check=True, capture_output=True, text=True)


def test_the_example_of_algorithms_works() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/algorithms.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    check = """
assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
assert loss.item() == 0.0 and metrics["actor/pg_clipfrac"] == 0.0
"""
    subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, check=True, capture_output=True, text=True)


def test_every_method_is_on_the_page() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    assert [name for name in (*ADVANTAGES, *POLICY_LOSSES, *get_args(AggMode)) if f"`{name}`" not in page] == []
