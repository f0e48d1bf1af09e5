"""Commands, Python and links of the pages: commands run, or their configuration composes; links have a target."""

import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import dropwhile, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import pytest

from configs.base.keys import keys_of
from configs.required import required_keys
from configs.schema.common import AggMode
from configs.schema.ppo import PPOConfig
from tests.experiments import EXPERIMENTS, started_by
from tests.layout.source import ROOT, parse, python_files
from trainer import (
    main_dpo,
    main_eval,
    main_export,
    main_generation,
    main_parity,
    main_ppo,
    main_reward_model,
    main_serve,
    main_serve_reward,
    main_sft,
)  # fmt: skip
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.policy_losses import POLICY_LOSSES
from trainer.main_translate import translate

# Start of a command that no test runs -> why.
NOT_RUN = {
    ".venv/bin/pre-commit install": "changes the clone's hooks",
    "bash": "runs what the line before it has written",
    "cp": "tests/examples/test_plain_engine.py does",
    "git": "needs a network, or changes the clone",
    "mkdocs": "tests/scripts/test_docs_site.py builds the site",
    "pip install": "changes the environment",
    "pytest": "tests run themselves; the file must exist",
    "ray": "needs a cluster; the submitted command is composed",
    "sbatch": "needs Slurm",
    "source": "enters the environment",
    "tensorboard": "serves until it is stopped",
}
# Page -> the test that runs all its commands and its Python.
RUN_ELSEWHERE = {"docs/how_to/engine.md": "tests/examples/test_plain_engine.py"}
# Page -> why its Python is only compiled.
COMPILED = {
    "docs/coming_from_openrlhf.md": "it downloads",
    "docs/serve.md": "it needs a server, as tests/trainer/serving/test_model_app.py starts one",
    "docs/python_api.md": "it trains, as tests/trainer/cli/test_api.py does",
}
# Module -> a row that replaces the hub's data.
RAW = {
    "data_preprocess.gsm8k": {"question": "1 + 1?", "answer": "Two. #### 2"},
    "data_preprocess.math_dataset": {"problem": "1 + 1?", "solution": r"\boxed{2}", "level": "Level 1", "type": "Algebra"},
}
PROGRAM_WORDS = re.compile(r"(python|pip|pytest|git|scripts/\S+|mkdocs|ray|bash|tandem-\S+) ")

FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
MODULES = (
    main_ppo, main_sft, main_reward_model, main_dpo, main_generation, main_eval, main_parity, main_export, main_serve,
    main_serve_reward,
)  # fmt: skip
PROGRAMS = {module.PROGRAM.name: module.PROGRAM for module in MODULES}


def blocks(page: str, *languages: str) -> list[str]:
    return [text for kind, text in re.findall(FENCED, (ROOT / page).read_text()) if kind in languages]


def lines(page: str) -> Iterator[str]:
    """Command lines of a page: all of fenced shell blocks, those of indented blocks and inline code that start with a program."""
    for block in blocks(page, "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")
    prose = FENCED.sub("", (ROOT / page).read_text())
    for line in prose.replace("\\\n", " ").splitlines():
        if line.startswith("    ") and PROGRAM_WORDS.match(line.strip()):
            yield line.strip()
    yield from (code for code in re.findall(r"`(python -m trainer\.main_\w+ [^`]+)`", prose) if "<" not in code)


def commands(page: str) -> list[list[str]]:
    """Words of every command, without comments, variables before it, pipes, redirections, and `...`, which replaces the reader's
    arguments."""
    split = (shlex.split(line, comments=True) for line in lines(page))
    bare = (list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word) or word == "exec", words)) for words in split)
    cut = (list(takewhile(lambda word: not re.match(r"[12]?>|\||<", word), words)) for words in bare)
    return [[word for word in words if word != "..."] for words in cut if words]


COMMANDS = [(page, words) for page in PAGES if page not in RUN_ELSEWHERE for words in commands(page)]
PROGRAM_COMMANDS = [words for _, words in COMMANDS if words[1:2] == ["-m"] and words[2] in PROGRAMS]
PROGRAM_COMMANDS += [words[words.index("--") + 1 :] for _, words in COMMANDS if words[:3] == ["ray", "job", "submit"]]
PROGRAM_COMMANDS += [
    ["python", "-m", name, *shlex.split(line)] for name, program in PROGRAMS.items() for line in program.examples
]


def distinct(found: list[list[str]]) -> list[list[str]]:
    return [list(words) for words in dict.fromkeys(map(tuple, found))]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with examples/ and a scorer that --help names."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_rewards.py").write_text("def helpful(**answer):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("words", distinct(PROGRAM_COMMANDS), ids=" ".join)
def test_training_commands_compose(words: list[str], workspace: Path) -> None:
    """Without a launcher, which needs its cluster; with two trials of a search."""
    if any(word.startswith("hydra/launcher=") for word in words):
        words = [word for word in words if not word.startswith(("hydra/launcher", "hydra.launcher."))]
    words = [re.sub(r"^(hydra.sweeper.n_trials)=\d+", r"\1=2", word) for word in words]
    program = PROGRAMS[words[2]]
    # Commands that show other keys leave out the model.
    model = [f"{key}=a" for key in ("model.path", "actor_rollout_ref.model.path") if key in required_keys(program.root)]
    assert program([*model, *words[3:], "trainer.dry_run=config"]) == 0


@pytest.mark.parametrize(
    "words", distinct([words for _, words in COMMANDS if words[0].removeprefix("scripts/") in EXPERIMENTS]), ids=" ".join
)
def test_experiments_compose(words: list[str], workspace: Path) -> None:
    _, module, *arguments = started_by(words[0].removeprefix("scripts/"), *words[1:], "trainer.dry_run=config")
    assert PROGRAMS[module](arguments) == 0


MADE_HERE = [words for _, words in COMMANDS if " ".join(words).startswith(("python -m data_preprocess.", "python examples/"))]


@pytest.mark.parametrize("words", distinct(MADE_HERE), ids=" ".join)
def test_data_is_written(words: list[str], workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[1] == "-m":
        raw = RAW.get(words[2])
        for split in ("train", "test") if raw else ():
            (workspace / f"{split}.jsonl").write_text(json.dumps(raw))
        importlib.import_module(words[2]).main([*words[3:], *([f"--local_dataset_path={workspace}"] if raw else [])])
    else:
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    assert [*workspace.rglob("*.parquet")] or [*workspace.rglob("*.safetensors")]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_every_command_exists(page: str, words: list[str]) -> None:
    """Every command is run or composed by a test of this file, or starts like one of NOT_RUN."""
    line, program = " ".join(words), words[0]
    if program == "python" and words[1] == "-m":
        own = ("trainer.report", "trainer.main_compare", "trainer.main_init", "trainer.main_plan", "trainer.main_translate")
        known = [*PROGRAMS, *own]
        assert words[2] in known or words[2].startswith("data_preprocess."), line
        assert importlib.util.find_spec(words[2]) is not None
        if words[2] == "trainer.main_translate":
            assert translate(words[3:]) == 0
    elif program == "python" and words[1].startswith("scripts/bench/"):  # minutes each, some of them on GPUs
        sources = "".join(path.read_text() for path in (ROOT / words[1]).parent.glob("*.py"))
        flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
        assert (ROOT / words[1]).is_file() and [flag for flag in flags if flag.removeprefix("--") not in sources] == []
    elif program == "python":
        assert words in MADE_HERE, line
    elif program.startswith("scripts/"):
        assert (ROOT / program).stat().st_mode & 0o111, f"{page}: {program} does not exist, or is not executable"
        subprocess.run(["bash", "-n", ROOT / program], check=True)
    else:
        assert line.startswith(tuple(NOT_RUN)), f"{page}: {line}: unknown program; add it to NOT_RUN, or a test that runs it"
        files = [word.partition("::")[0] for word in words[1:] if word.startswith("tests/")]
        assert [file for file in files if not (ROOT / file).exists()] == []


def test_commands_are_found_in_fenced_and_indented_blocks_and_inline() -> None:
    assert ("README.md", ["scripts/quickstart.sh"]) in COMMANDS
    assert ("docs/performance.md", ["python", "scripts/bench/context.py", "predict"]) in COMMANDS
    assert ("docs/examples.md", ["python", "-m", "trainer.main_ppo", "recipe=quickstart", "algorithm=ppo"]) in COMMANDS
    assert len(PROGRAM_COMMANDS) > 50 and len(MADE_HERE) > 3


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]
# Page -> assertions to run after its Python.
THEN = {
    "CONTRIBUTING.md": """
import torch
inputs = AdvantageInputs(
    token_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0]),
    response_mask=torch.tensor([0, 1, 0, 1, 1]),
    lengths=torch.tensor([2, 3]),
    uid=torch.tensor([0, 1]),
)
assert ADVANTAGES["batch_mean"](inputs, None).advantages.tolist() == [0.0, -1.0, 0.0, 1.0, 1.0]
""",
    "docs/algorithms.md": """
assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
assert loss.item() == 0.0 and metrics["actor/pg_clipfrac"] == 0.0
""",
}


def test_python_of_the_pages_compiles() -> None:
    for page, code in PYTHON:
        compile(code, page, "exec")
    assert {page for page, _ in PYTHON} >= {"docs/how_to/reward.md", "docs/how_to/algorithm.md", "docs/how_to/data_set.md"}


def test_python_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block separately, all in another process, because some register a name."""
    runnable = [(page, code + THEN.get(page, "")) for page, code in PYTHON if page not in COMPILED and page not in RUN_ELSEWHERE]
    assert {page for page, _ in runnable} >= THEN.keys()
    monkeypatch.chdir(tmp_path)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:  # fork: the imports of this file are loaded
        pool.submit(run_all, runnable).result()


def run_all(codes: list[tuple[str, str]]) -> None:
    for page, code in codes:
        exec(compile(code, page, "exec"), {"__name__": page})


def test_python_of_the_how_to_pages_is_from_examples() -> None:
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for page in ("docs/how_to/reward.md", "docs/how_to/algorithm.md"):
        assert [code for code in blocks(page, "python") if not any(code in text for text in examples)] == []


def test_messages_quoted_by_troubleshooting_exist() -> None:
    """Quoted literally; … replaces what varies."""
    existing = {" ".join(message.split()) for path in python_files() for message in messages(parse(path))}
    # The second is Python's own: tests/trainer/test_main_ppo_own_folders.py.
    existing |= {(ROOT / "scripts/setup_env.sh").read_text(), "No module named trainer.main_ppo"}
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+ [^`]+)`", cell) if not quote.startswith("pip ")]
    assert len(quotes) > 20
    assert [quote for quote in quotes if not any(quote.strip("… ") in message for message in existing)] == []


def messages(tree: ast.Module) -> Iterator[str]:
    """String literals of a module, with … for formatted values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_links_exist(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_prose_exist(page: str) -> None:
    paths = re.findall(r"`((?:configs|data_preprocess|docs|scripts|tests|trainer|workers)/[\w./-]*)`", (ROOT / page).read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_method_is_on_the_algorithms_page() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    assert [name for name in (*ADVANTAGES, *POLICY_LOSSES, *get_args(AggMode)) if f"`{name}`" not in page] == []


def test_readme_says_for_whom_it_is_and_what_to_use_instead() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Is it for you?")[1].split("\n## ")[0]
    instead = [line.split("|")[1] for line in section.splitlines() if line.startswith("| [")]
    assert all(any(name in cell for cell in instead) for name in ("verl", "OpenRLHF", "TRL"))
    assert "Not there yet:" in section and len(text.splitlines()) <= 140


def test_readme_counts_the_keys() -> None:
    (counted,) = re.findall(r"the configuration's (\d+) keys", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(counted) == len(keys_of(PPOConfig).leaves)
