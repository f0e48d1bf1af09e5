"""Command lines of OpenRLHF, and their translations."""

import shlex
import subprocess
from pathlib import Path

from configs.compat.openrlhf.script import script
from configs.compat.openrlhf.table import openrlhf
from trainer import main_dpo, main_generation, main_ppo, main_reward_model, main_sft
from trainer.cli.program import Program

PUBLIC = (Path(__file__).parent / "openrlhf_commands.txt").read_text(encoding="utf-8").splitlines()
"""Command lines of public scripts, with PATH and KEY in place of private values."""
PROGRAMS: dict[str, Program] = {
    module.PROGRAM.name: module.PROGRAM  # type: ignore[dict-item]
    for module in (main_ppo, main_sft, main_reward_model, main_dpo, main_generation)
}
PPO = "--pretrain sft --reward_pretrain rm --prompt_data prompts.parquet --vllm_num_engines 1 "
"""Required flags of train_ppo_ray."""


def translated(line: str) -> str:
    return script(shlex.split(line), openrlhf())


def argv(text: str) -> list[str]:
    """Arguments that bash passes to python."""
    shell = f"python() {{ printf '%s\\0' \"$@\"; }}\n{text}"
    result = subprocess.run(["bash", "-euc", shell], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split("\0")[:-1]


def settings(line: str) -> dict[str, str]:
    """{key: unparsed value} of a translation."""
    return dict(word.split("=", 1) for word in argv(translated(line))[2:])


def comment(line: str, flag: str) -> str:
    """The comment of a flag."""
    (found,) = (one for one in translated(line).splitlines() if f"{flag} " in one or f"{flag}:" in one or f"{flag}," in one)
    return found


def dry_run(text: str) -> int:
    """The exit code of the program, whose configuration is checked in this process."""
    flag, program, *words = argv(text)
    assert flag == "-m"
    return PROGRAMS[program]([*words, "trainer.dry_run=config"])
