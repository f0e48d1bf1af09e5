"""Public command lines of conversations for verl's main_ppo: at least 95 % compose, and the others say what is not supported."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import yaml

from configs.compose import compose_with_notes
from trainer.main_ppo import PROGRAM

FILE = Path(__file__).with_name("verl_turns_commands.txt")


@dataclass
class Line:
    """A command line. file: its configuration in FILE; words: its arguments. refused: start of its error; "" if it composes."""

    file: str = ""
    words: list[str] = field(default_factory=list)
    refused: str = ""


@cache
def known() -> tuple[dict[str, list[str]], dict[str, Line]]:
    """Configurations of the repositories, as key=value by name, and command lines by repository and script."""
    files, lines = dict[str, list[str]](), dict[str, Line]()
    words: list[str] = []
    for text in FILE.read_text().splitlines():
        head, _, rest = text.partition(" ")
        if text.startswith("<"):
            words = files[text[1:-1]] = []
        elif text.startswith("["):
            line = lines[text[1:-1]] = Line()
            words = line.words
        elif head == "yaml":
            line.file = rest
        elif head == "refused":
            line.refused = rest
        elif head == "like":
            words += lines[rest].words
        elif head == "without":
            words[:] = [word for word in words if word.partition("=")[0] != rest]
        elif text and head not in ("#", "commit"):
            key = text.partition("=")[0]
            words[:] = [word for word in words if word.partition("=")[0] != key]
            words.append(text)
    return files, lines


def arguments(line: Line) -> list[str]:
    """Words of a line, after those that its configuration sets."""
    own = known()[0].get(line.file, [])
    defaults = [word.removeprefix("defaults=") for word in own if word.startswith("defaults=")]
    return [
        *(f"--config-name={name}" for name in defaults),
        *(f"++{word}" for word in own if word[:9] != "defaults="),
        *line.words,
    ]


def problems(line: Line) -> list[str]:
    """Problems of a line, as trainer.dry_run=config reports them. Neither models nor data nor files of tools exist."""
    try:
        config, typed, _ = compose_with_notes(PROGRAM.root, PROGRAM.schema, arguments(line))
        PROGRAM.check(config, typed)
    except ValueError as error:
        return str(error).splitlines()
    return []


def test_at_least_95_percent_of_the_command_lines_compose() -> None:
    lines = known()[1]
    found = {name: problems(line) for name, line in lines.items()}
    unlike = {name: found[name] for name, line in lines.items() if bool(found[name]) != bool(line.refused)}
    assert not unlike
    for name, line in lines.items():
        assert any(problem.startswith(line.refused) for problem in found[name]) or not line.refused, (name, found[name])
    # Not counted: 2 for Ascend NPUs, and 5 of geo3k, which compose but have rows with images.
    supported = [name for name, line in lines.items() if "trainer.device=npu" not in line.words and "geo3k" not in name]
    passing = [name for name in supported if not found[name]]
    assert len(supported) >= 80 and len(passing) >= 0.95 * len(supported), f"{len(passing)} of {len(supported)}"


@pytest.mark.parametrize(
    "name",
    [
        "volcengine/verl examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh",
        "YuxiangZhang0114/verl baseline/GRPO/run_grpo_search_r1_like_14b.sh",
    ],
)
def test_a_command_line_composes_with_the_configuration_file_of_its_repository(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, lines = known()
    tree: dict[str, object] = {"defaults": ["ppo_trainer", "_self_"]}
    for word in files[lines[name].file]:
        key, _, value = word.partition("=")
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})  # type: ignore[assignment]
        node[last] = yaml.safe_load(value)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    flags = [f"--config-path={tmp_path}", "--config-name=own"]
    assert PROGRAM([*flags, *lines[name].words, "trainer.dry_run=config"]) == 0
    assert "configuration is fine" in capsys.readouterr().out


def test_every_repository_has_its_commit() -> None:
    commits = [line.split()[1] for line in FILE.read_text().splitlines() if line.startswith("commit ")]
    assert {name.split()[0] for name in known()[1]} == {*commits} and len({*commits}) == len(commits)
