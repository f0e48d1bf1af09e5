"""The command line of trainer.main_translate."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.base.keys import CONFIG_DIR
from tests.configs.compat.openrlhf.commands import PPO, translated
from trainer.main_translate import translate


@pytest.mark.parametrize("between", [["--"], []])
def test_translation_is_printed(between: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(["openrlhf", *between, *PPO.split()]) == 0
    assert capsys.readouterr().out == translated(PPO) + "\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("openrlhf -- openrlhf.cli.train_kto --bf16", "train_kto: KTO is not supported; with pairs of a chosen and a rejected"),
        (
            "openrlhf -- --actor_learnin_rate 1",
            "--actor_learnin_rate: train_ppo_ray has no such flag; did you mean --actor_learning_",
        ),
        ("trl -- --x", "trl: no command lines of it are known; openrlhf"),
    ],
)
def test_invalid_argument_is_a_one_line_error(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {line}") and err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert (translate(["--help"]), translate([])) == (0, 2)
    out = capsys.readouterr().out
    assert "train_ppo_ray, train_sft, train_rm, train_dpo, batch_inference" in out


def test_output_is_a_command_for_bash(tmp_path: Path) -> None:
    """In a separate process, whose output bash runs."""
    shell = (
        f'set -e; python() {{ "{sys.executable}" "$@"; }}; export -f python\n'
        f"python -m trainer.main_translate openrlhf -- {PPO} > run.sh\n"
        'bash -c "$(cat run.sh) trainer.dry_run=config"'
    )
    result = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env={"PYTHONPATH": str(CONFIG_DIR.parent)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("configuration is fine: ")
