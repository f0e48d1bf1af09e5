"""python -m trainer.main_init: the files of a task of one's own."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.cli.program import complain
from trainer.new_task.create import TEMPLATES, create
from trainer.new_task.sizes import this_machine

ABOUT = (
    "Writes a folder with a task to edit: problems and their score (task.py), a test, recipes sized for this machine, and a "
    "README with the commands."
)


def init(argv: Sequence[str]) -> int:
    """The exit code: 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m trainer.main_init", description=ABOUT)
    parser.add_argument("name", help="folder to write, which must not exist; its last part names the task")
    kinds = ", ".join(TEMPLATES)
    parser.add_argument("--from", dest="template", default=TEMPLATES[0], metavar="TASK", help=f"{kinds} (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.template not in TEMPLATES:
        return complain(f"--from {args.template}: there is no such task to begin with; {kinds}")
    try:
        written = create(Path(args.name), args.template, this_machine())
    except (ValueError, OSError) as error:
        return complain(str(error))
    print(*written, sep="\n")
    print(f"next: cd {args.name}, and the commands of README.md")
    return 0


def main() -> None:
    sys.exit(init(sys.argv[1:]))


if __name__ == "__main__":
    main()
