"""Compare Tandem's GRPO step with that of another system, in one run on one machine: a table, JSON, and a picture.

    python scripts/bench/compare.py --task quickstart --rival trl
    python scripts/bench/compare.py --task step --rival verl --rounds 3 --json step.json --plot step.png
    python scripts/bench/compare.py --task ragged --rival trl --steps 3 trainer.backend=local

Both sides get the same files and settings: model, prompts, reward, response lengths, learning rate, KL coefficient. The rival
runs in a separate environment, which rivals/install.sh installs from the package registry (--env; kept and used again). Whole
runs alternate, and the side that starts changes each round; warm-up steps are left out. Wall seconds are a round's median of
whole steps; CPU seconds are those of all processes of a run, without Ray's daemons. A ratio is Tandem's seconds over the rival's
in the same round; the table has the median, minimum and maximum over rounds. There is no ratio unless both sides had the same
tokens and updates in each step, and the same dtype and threads. Further arguments are overrides of Tandem's side.

A rival's driver: `<env>/bin/python -P rivals/<name>.py --task task.json --out out.json`. step.py writes task.json.
out.json: rival, version, versions, dtype, threads, startup_s, and steps, only the measured ones: wall_s, cpu_s, prompt_tokens,
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
    result = {"tandem": middle_of([tandem for tandem, _ in rounds]), args.rival: middle_of([rival for _, rival in rounds])}
    figures = {"task": args.task, "settings": vars(work), "overrides": overrides, "ratios": ratios(rounds), "rounds": rounds}
    if args.json is not None:
        args.json.write_text(json.dumps(figures | {"load": os.getloadavg()}, indent=1))
    if args.plot is not None:
        draw(result, f"{args.task}: GRPO step, {work.threads} thread", args.plot)
    print(table(result))
    print("\n".join(ratio_lines(args.rival, figures["ratios"])))


def installed(rival: str, env: Path | None) -> Path:
    """Path of Python in the rival's environment, which is installed if it does not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = env or cache / "tandem" / "rivals" / rival
    call([RIVALS / "install.sh", rival, folder], f"the installation of {rival}", os.environ)
    return folder / "bin/python"


def one_round(work: Workload, rival: str, python: Path, overrides: Sequence[str], number: int) -> tuple[Report, Report]:
    """Reports of Tandem and the rival. Exits with a one-line message if they did not do the same work."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(work, Path(folder), seed=number)
        sides = {
            "tandem": lambda: run_tandem(work, task, Path(folder) / "run", overrides),
            rival: lambda: run_rival(rival, python, Path(folder), work.threads),
        }
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        reports = {side: sides[side]() for side in order}
    print(table(reports), file=sys.stderr)
    found = difference(reports["tandem"], reports[rival])
    if found is not None:
        raise SystemExit(f"no ratio, the sides differ in round {number + 1}: {found}")
    return reports["tandem"], reports[rival]


def run_rival(rival: str, python: Path, folder: Path, threads: int) -> Report:
    out = folder / "out.json"
    command = [python, "-P", RIVALS / f"{rival}.py", "--task", folder / "task.json", "--out", out]
    # PYTHONPATH would put this environment's packages before those of the rival's environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    call(command, f"the run of {rival}", environment)
    return json.loads(out.read_text())


def call(command: Sequence[str | Path], what: str, environment: Mapping[str, str]) -> None:
    """Run a command; its output goes to stderr, because stdout has only the table."""
    code = subprocess.run(command, stdout=2, env=environment).returncode
    if code:
        raise SystemExit(f"{what} ended with {code}")


def difference(tandem: Report, rival: Report) -> str | None:
    """First difference between the work of the two runs; None if it is the same, and their times can be compared."""
    names = tandem["rival"], rival["rival"]
    for field in ("dtype", "threads"):
        if tandem[field] != rival[field]:
            return f"{field}: {names[0]} {tandem[field]}, {names[1]} {rival[field]}"
    if len(tandem["steps"]) != len(rival["steps"]):
        return f"measured steps: {names[0]} {len(tandem['steps'])}, {names[1]} {len(rival['steps'])}"
    for number, (step, other) in enumerate(zip(tandem["steps"], rival["steps"], strict=True), start=1):
        for field, words in PER_STEP.items():
            if step[field] != other[field]:
                return f"{words} of measured step {number}: {names[0]} {step[field]}, {names[1]} {other[field]}"
    return None


def ratios(rounds: Sequence[tuple[Report, Report]]) -> dict[str, list[float]]:
    """Tandem's seconds over the rival's, one ratio per round."""
    middles = [(medians(tandem), medians(rival)) for tandem, rival in rounds]
    return {kind: [tandem[kind] / rival[kind] for tandem, rival in middles] for kind in ("wall_s", "cpu_s")}


def ratio_lines(rival: str, found: dict[str, list[float]]) -> list[str]:
    names = {"wall_s": "wall", "cpu_s": "CPU"}
    return [
        f"tandem / {rival}, {names[kind]}: {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}, {len(each)} rounds)"
        for kind, each in found.items()
    ]


def middle_of(reports: Sequence[Report]) -> Report:
    """Report with the median step time (of an even number, the faster of the two)."""
    return sorted(reports, key=lambda report: medians(report)["wall_s"])[(len(reports) - 1) // 2]


def draw(reports: dict[str, Report], title: str, path: Path) -> None:
    """Draw one stacked bar per side: a step's seconds by phase; a dashed line marks CPU seconds."""
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
