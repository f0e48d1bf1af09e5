"""Command lines as they stand in verl's public scripts: they pass unchanged, or the answer says what is not here."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer.main_ppo import PROGRAM


@dataclass
class Known:
    """words: of the command line. refused: what the answer says; "": it passes."""

    words: list[str] = field(default_factory=list)
    refused: str = ""


def known_commands() -> dict[str, Known]:
    """By name."""
    found: dict[str, Known] = {}
    for line in Path(__file__).with_name("verl_commands.txt").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if line.startswith("["):
            command = found[head[1:-1]] = Known()
        elif head == "refused":
            command.refused = rest
        elif head == "like":
            command.words += found[rest].words
        elif line and head != "#":
            command.words.append(line)
    return found


COMMANDS = known_commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_public_command_line_passes_or_says_what_is_not_here(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither models nor data exist."""
    command = COMMANDS[name]
    code = PROGRAM([*command.words, "trainer.dry_run=config"])
    said = capsys.readouterr()
    errors = [line.removeprefix("error: ") for line in said.err.splitlines() if line.startswith("error: ")]
    if command.refused:
        assert code == 2 and any(error.startswith(command.refused) for error in errors), errors
    else:
        assert (code, errors) == (0, []) and said.out.startswith("configuration is fine: ")


def test_most_of_them_pass() -> None:
    passing = [name for name, command in COMMANDS.items() if not command.refused]
    assert len(COMMANDS) >= 35 and len(passing) >= 0.8 * len(COMMANDS)
