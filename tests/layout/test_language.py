"""Plain technical English: words and phrases that are not used in the folders listed in CLEAN.

Covers source, YAML and documents; identifiers are split at underscores and capitals. CONTRIBUTING.md («Glossary») has the terms
to use instead.
"""

import re
from pathlib import Path

import pytest

from tests.layout.source import ROOT

CLEAN = (
    "configs", "data_preprocess", "examples", "scripts", "tests/configs", "tests/layout", "tests/scripts",
    "tests/workers/engine", "tests/workers/roles", "tests/workers/rollout", "trainer", "workers",
    "tests/trainer", "tests/workers",
    "tests/broken.py", "tests/conftest.py", "tests/experiments.py", "tests/faults.py", "tests/kills.py", "tests/long_haul.py",
    "tests/nodes.py", "tests/pickles.py", "tests/reads.py", "tests/reward_models.py", "tests/runs.py", "tests/serving.py",
    "tests/slurm.py", "tests/terminal.py", "tests/tiny.py", "tests/turns.py", "tests/warm.py",
    "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "mkdocs.yml",
)  # fmt: skip
"""Folders, or single files, that contain none of BANNED. Add a folder when it is done."""

BANNED = (
    r"told|tells|said",
    r"ours|theirs",
    r"beside",
    r"mend(?:s|ed|ing)?",
    r"ill|sick",
    r"whoever|whomever|nobody",
    r"becomes? of|became of",
    r"(?:goes|go|went) on",
    r"so many",
    r"(?:of|the|its|their|these|those|own|other|all|new|no|same|answer's|response's) draws",
    r"to the bit",
    r"worth",
)
PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b".replace(" ", r"\s+"), re.IGNORECASE)
SUFFIXES = {".py", ".yaml", ".yml", ".md", ".sh", ".toml"}


def words_of(line: str) -> str:
    """The line with identifiers split into words: `_told_ranks` and `ToldRanks` both contain «told»."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line.replace("_", " "))


def hits(path: Path) -> list[str]:
    """«file:line: phrase: text» of each banned phrase in a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    # Match over the whole text, so that a phrase broken over two lines is found too; positions keep their line.
    joined = "\n".join(map(words_of, lines))
    for match in PATTERN.finditer(re.sub(r"\n(?:\s*#)?", lambda gap: "\n" + " " * (len(gap[0]) - 1), joined)):
        number = joined.count("\n", 0, match.start())
        found.append(f"{path.relative_to(ROOT)}:{number + 1}: {match[0]!r}: {lines[number].strip()}")
    return found


def files_of(name: str) -> list[Path]:
    """A file, or the files of a folder, except this one, which contains the words as data."""
    root = ROOT / name
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    return [path for path in files if path != Path(__file__).resolve()]


@pytest.mark.parametrize("name", CLEAN)
def test_no_banned_words(name: str) -> None:
    found = [hit for path in files_of(name) for hit in hits(path)]
    assert not found, f"{len(found)} banned words or phrases:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "_told = set()",
        "class ToldRanks:",
        "# what becomes of it",
        "so many tokens",
        "the draws",
        "run goes on",
        "equal to the bit",
    ],
)
def test_pattern_finds_banned_words_in_identifiers_and_prose(line: str) -> None:
    assert PATTERN.search(words_of(line)) is not None


@pytest.mark.parametrize(
    "line", ["side by side", "it draws from", "will fill", "unfold = skill", "recommended", "a worthwhile", "as many tokens"]
)
def test_pattern_accepts_similar_words(line: str) -> None:
    assert PATTERN.search(words_of(line)) is None
