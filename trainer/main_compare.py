"""python -m trainer.main_compare: compare runs as an HTML page and a PNG."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.cli.program import complain

OUT = "out="
HELP = """\
python -m trainer.main_compare DIRECTORY [DIRECTORY ...] [out=PATH]

Prints last values, and writes PATH.html and PATH.png: where the configurations of these runs differ, and their curves side by
side. PATH is by default `comparison` in a sweep's directory, or next to the runs. Runs that differ in seeds alone are one curve,
their mean, within a band from the least to the largest. A directory is a run's, or holds the runs of a sweep; a run may still be
going on.

Examples
  python -m trainer.main_compare runs/first runs/second
  python -m trainer.main_compare runs/sweep out=runs/sweep/comparison"""


def compare(argv: Sequence[str]) -> int:
    """The exit code: 0, or 2 for a user error."""
    if not argv or {"-h", "--help"} & {*argv}:
        print(HELP)
        return 0 if argv else 2
    if dashed := [word for word in argv if word.startswith("-")]:
        return complain(f"{dashed[0]}: there is no such flag; run directories, and out=PATH")
    outs = [word.removeprefix(OUT) for word in argv if word.startswith(OUT)]
    directories = [Path(word) for word in argv if not word.startswith(OUT)]
    out = outs[-1].removesuffix(".html").removesuffix(".png") if outs else ""
    if outs and (out.endswith("/") or not Path(out).name):
        return complain(f"out={outs[-1]}: must be a file's path, of which .html and .png are made")
    if not directories:
        return complain(f"out={out}: there is nothing to compare; name run directories, or a sweep's")
    from trainer.report.compare import default_path, find_runs, groups_of, table, write_comparison

    try:
        groups = groups_of(find_runs(directories))
        paths = write_comparison(groups, Path(out) if outs else default_path(directories))
    except (ValueError, OSError) as error:
        return complain(" ".join(str(error).split()))
    print("\n".join(table(groups)))
    print(f"comparison: {' '.join(map(str, paths))}")
    return 0


def main() -> None:
    sys.exit(compare(sys.argv[1:]))


if __name__ == "__main__":
    main()
