"""python -m trainer.main_translate: translate a command line of another framework."""

import sys
from collections.abc import Sequence

from configs.base.keys import ConfigError
from configs.compat.openrlhf.script import script
from configs.compat.openrlhf.table import openrlhf
from trainer.cli.program import complain

HELP = """\
python -m trainer.main_translate openrlhf -- [launcher ...] [PROGRAM] --flag value ...

Prints the command that does what a command of OpenRLHF does: a comment for each flag (mapped | implied | no counterpart,
and why), OpenRLHF's defaults that differ, and below them the command. The text runs in bash as it stands.

PROGRAM is {programs}, as openrlhf.cli.NAME or alone; without one
the flags are train_ppo_ray's. Older flags (--actor_learning_rate) and newer ones (--actor.adam.lr) are known:
docs/coming_from_openrlhf.md.

Examples
  python -m trainer.main_translate openrlhf -- train_sft --pretrain Qwen/Qwen3-0.6B --dataset chat.parquet --output_key answer
  python -m trainer.main_translate openrlhf -- --pretrain sft --reward_pretrain rm --prompt_data prompts.parquet > run.sh
  bash -c "$(cat run.sh) trainer.dry_run=config"  # check the configuration, start nothing"""


def translate(argv: Sequence[str]) -> int:
    """The exit code: 0, or 2 for a user error."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(programs=", ".join(openrlhf().sources)))
        return 0 if words else 2
    if words[0] != "openrlhf":
        return complain(f"{words[0]}: no command lines of it are known; openrlhf")
    flags = words[2:] if words[1:2] == ["--"] else words[1:]
    try:
        print(script(flags, openrlhf()))
    except ConfigError as error:
        return complain(*str(error).splitlines())
    return 0


def main() -> None:
    sys.exit(translate(sys.argv[1:]))


if __name__ == "__main__":
    main()
