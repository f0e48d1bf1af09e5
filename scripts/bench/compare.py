"""Tandem's GRPO step beside that of another system, in one run on one machine: a table, JSON, and a picture.

    python scripts/bench/compare.py --task quickstart --rival trl
    python scripts/bench/compare.py --task step --rival verl --rounds 3 --json step.json --plot step.png
    python scripts/bench/compare.py --task ragged --rival trl --steps 3 trainer.backend=local

Both sides get the same files: model, prompts, reward, the lengths of the answers, learning rate, KL coefficient. The rival works
in an environment of its own, which rivals/install.sh makes from the package registry (--env; kept and used again). Whole runs
alternate, in each round the other side first; first steps are left out. Wall seconds are a round's median of whole steps; CPU
seconds those of all processes that do the work, without Ray's daemons. A ratio is Tandem's seconds over the rival's in the same
round; the table has the median over rounds, and from where to where they went. There is no ratio unless both sides had the same
tokens and updates in each step, and the same type and threads. Further arguments are overrides of Tandem's side.

A rival's driver: `<env>/bin/python -P rivals/<name>.py --task task.json --out out.json`. task.json is what step.py writes.
out.json: rival, version, versions, dtype, threads, startup_s, and steps, the measured ones alone: wall_s, cpu_s, prompt_tokens,
response_tokens (of all rows), updates (of the optimizer), phases (seconds by name).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from scripts.bench.step import Workload, add_workload, make_task, medians, run_tandem, table, workload

RIVALS = Path(__file__).parent / "rivals"
PER_STEP = {"prompt_tokens": "prompt tokens", "response_tokens": "response tokens", "updates": "updates"}
Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", choices=("trl", "verl"), required=True)
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--env", type=Path, help="folder of the rival's environment (default: in the user's cache)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="picture of both sides' phases")
    add_workload(parser)
    args, overrides = parser.parse_known_args(argv)
    work, python = workload(args), installed(args.rival, args.env)
    rounds = [one_round(work, args.rival, python, overrides, number) for number in range(args.rounds)]
    result = {"tandem": middle_of([ours for ours, _ in rounds]), args.rival: middle_of([theirs for _, theirs in rounds])}
    figures = {"task": args.task, "settings": vars(work), "overrides": overrides, "ratios": ratios(rounds), "rounds": rounds}
    if args.json is not None:
        args.json.write_text(json.dumps(figures | {"load": os.getloadavg()}, indent=1))
    if args.plot is not None:
        draw(result, f"{args.task}: GRPO step, {work.threads} thread", args.plot)
    print(table(result))
    print("\n".join(ratio_lines(args.rival, figures["ratios"])))


def installed(rival: str, env: Path | None) -> Path:
    """The Python of the rival's environment, which is made if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = env or cache / "tandem" / "rivals" / rival
    call([RIVALS / "install.sh", rival, folder], f"the installation of {rival}", os.environ)
    return folder / "bin/python"


def one_round(work: Workload, rival: str, python: Path, overrides: Sequence[str], number: int) -> tuple[Report, Report]:
    """Tandem's report and the rival's. Ends the program, with a line for people, if they did not do the same work."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(work, Path(folder), seed=number)
        sides = {
            "tandem": lambda: run_tandem(work, task, Path(folder) / "run", overrides),
            rival: lambda: run_rival(rival, python, Path(folder), work.threads),
        }
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        reports = {side: sides[side]() for side in order}
    print(table(reports), file=sys.stderr)
    difference = unequal(reports["tandem"], reports[rival])
    if difference is not None:
        raise SystemExit(f"no ratio, the sides differ in round {number + 1}: {difference}")
    return reports["tandem"], reports[rival]


def run_rival(rival: str, python: Path, folder: Path, threads: int) -> Report:
    out = folder / "out.json"
    command = [python, "-P", RIVALS / f"{rival}.py", "--task", folder / "task.json", "--out", out]
    # What PYTHONPATH adds to our packages is not for an environment of its own.
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = ours | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    call(command, f"the run of {rival}", environment)
    return json.loads(out.read_text())


def call(command: Sequence[str | Path], what: str, environment: Mapping[str, str]) -> None:
    """Its output goes to stderr: stdout is for the table alone."""
    code = subprocess.run(command, stdout=2, env=environment).returncode
    if code:
        raise SystemExit(f"{what} ended with {code}")


def unequal(ours: Report, theirs: Report) -> str | None:
    """What the two did differently; None if they did the same: only then their times may be compared."""
    names = ours["rival"], theirs["rival"]
    for field in ("dtype", "threads"):
        if ours[field] != theirs[field]:
            return f"{field}: {names[0]} {ours[field]}, {names[1]} {theirs[field]}"
    if len(ours["steps"]) != len(theirs["steps"]):
        return f"measured steps: {names[0]} {len(ours['steps'])}, {names[1]} {len(theirs['steps'])}"
    for number, (mine, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True), start=1):
        for field, words in PER_STEP.items():
            if mine[field] != other[field]:
                return f"{words} of measured step {number}: {names[0]} {mine[field]}, {names[1]} {other[field]}"
    return None


def ratios(rounds: Sequence[tuple[Report, Report]]) -> dict[str, list[float]]:
    """Of each round: Tandem's seconds over the rival's."""
    middles = [(medians(ours), medians(theirs)) for ours, theirs in rounds]
    return {kind: [ours[kind] / theirs[kind] for ours, theirs in middles] for kind in ("wall_s", "cpu_s")}


def ratio_lines(rival: str, found: dict[str, list[float]]) -> list[str]:
    names = {"wall_s": "wall", "cpu_s": "CPU"}
    return [
        f"tandem / {rival}, {names[kind]}: {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}, {len(each)} rounds)"
        for kind, each in found.items()
    ]


def middle_of(reports: Sequence[Report]) -> Report:
    """The report whose step took the median time (of an even number, the quicker of the two)."""
    return sorted(reports, key=lambda report: medians(report)["wall_s"])[(len(reports) - 1) // 2]


def draw(reports: dict[str, Report], title: str, path: Path) -> None:
    """A bar a side: a step's seconds, phase upon phase; a line across it: CPU seconds."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    phases = dict.fromkeys(phase for report in reports.values() for phase in report["steps"][0]["phases"])
    colours = {phase: f"C{i}" for i, phase in enumerate(phases)}
    for place, report in enumerate(reports.values()):
        middle, below = medians(report), 0.0
        for phase in report["steps"][0]["phases"]:
            axes.bar(place, middle[phase], bottom=below, width=0.6, color=colours[phase])
            if middle[phase] > 0.04 * middle["wall_s"]:
                axes.text(place, below + middle[phase] / 2, phase, ha="center", va="center", fontsize=8)
            below += middle[phase]
        axes.bar(place, max(middle["wall_s"] - below, 0.0), bottom=below, width=0.6, color="lightgrey")
        axes.hlines(middle["cpu_s"], place - 0.4, place + 0.4, colors="black", linestyles="dashed")
    axes.set_xticks(range(len(reports)), list(reports))
    axes.set_ylabel("seconds of a step (dashed: CPU)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
