"""The whole suite on two CPU cores in ten minutes: a table on stderr, JSON on stdout, and a plot.

    python scripts/bench/suite.py --plot suite.svg > suite.json
    python scripts/bench/suite.py --parts step dispatch
    python scripts/bench/suite.py --quick                    # smoke versions, whose figures mean nothing

The parts are separate benches with a time limit each, and run one after the other. One that fails, exceeds its limit, or lacks a
figure is reported in the table and the JSON, and the exit code is 1. A figure that misses its target is marked; this is no
failure.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
RUNNING: set["subprocess.Popen[str]"] = set()
"""Benches that run now, in any thread."""
LAST_LINES = 30  # printed of a bench that failed


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in a bench's report.

    of: the number, given the report. target: upper bound; lower bound if higher is better.
    """

    of: Callable[[Any], float]
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"

    def cost(self, value: float) -> float:
        """The value as a number of which less is better."""
        return value if self.better == "lower" else 1.0 / value

    def over_target(self, value: float) -> float | None:
        """Cost over the target's cost: above 1 the target is missed."""
        return None if self.target is None else self.cost(value) / self.cost(self.target)


@dataclass(frozen=True, slots=True)
class Part:
    """A bench: its module in scripts.bench, its arguments, those of its smoke version, and its time limit in seconds."""

    bench: str
    words: tuple[str, ...]
    quick: tuple[str, ...]
    seconds: float
    figures: Mapping[str, Figure]


def controller(report: Any, workers: int, sequences: int) -> dict[str, float]:
    """The case with this number of workers (-1: the maximum) and the nearest number of sequences."""
    most = max(case["workers"] for case in report["steps"]) if workers < 0 else workers
    cases = [case for case in report["steps"] if case["workers"] == most]
    return min(cases, key=lambda case: abs(case["sequences"] - sequences))


def first_workers(report: Any) -> int:
    """Number of workers of the first cases."""
    count: int = report["settings"]["workers"][0]
    return count


def flatness(report: Any, workers: int) -> float:
    """Cost per token with the most sequences, over that with the fewest."""
    return controller(report, workers, 1 << 30)["us_per_token"] / controller(report, workers, 0)["us_per_token"]


def gemm(report: Any, shape: str, part: str) -> float:
    return next(case for name, case in report["cases"].items() if name.startswith(shape))["parts"][part]["of_gemm"]


TINY = ("--prompts", "2", "--n", "2", "--steps", "2", "--hidden_size", "64", "--num_hidden_layers", "1", "trainer.backend=local")
PARTS = {
    "dispatch": Part("dispatch", ("--workers", "1", "64", "--megabytes", "500"), ("--quick",), 150, {
        "controller, us a token": Figure(lambda report: controller(report, first_workers(report), 4096)["us_per_token"]),
        "cost a token, most over fewest sequences": Figure(lambda report: flatness(report, first_workers(report)), 1.5),
        "most workers, 1,024 sequences: % of 10 s": Figure(lambda report: controller(report, -1, 1024)["percent_of_10_s"], 2.0),
        "bytes into and out of the store, over the batch's": Figure(
            lambda report: report["store"]["stored_over_bytes"] + report["store"]["read_over_bytes"], 2.01
        ),
    }),
    "step": Part("step", ("--steps", "4"), TINY, 120, {
        "GRPO step, 3.4M, s": Figure(lambda report: report["seconds"]["step"]),
        "outside generate, log-prob, update": Figure(lambda report: report["share_outside_generate_log_prob_update"]),
    }),
    "rollout": Part(
        "rollout", ("--workload", "ragged", "--engines", "embedded", "--rounds", "3", "--hf_batch_sizes", "64"),
        ("--quick", "--workload", "ragged", "--engines", "embedded"), 150, {
        "ragged answers, tokens a CPU second": Figure(
            lambda report: report["workloads"]["ragged"]["tokens_per_cpu_second"]["embedded"], better="higher"
        ),
    }),
    "train": Part("train", ("--shapes", "84m", "--dtypes", "float32", "--rounds", "1"), ("--quick",), 240, {
        "forward, of GEMM": Figure(lambda report: gemm(report, "", "forward"), 0.8, "higher"),
        "forward and backward, of GEMM": Figure(lambda report: gemm(report, "", "f+b"), 0.8, "higher"),
        "padding": Figure(lambda report: next(iter(report["cases"].values()))["padding_waste"], 0.02),
    }),
    "memory": Part("memory", ("--shape", "vocabulary", "--device", "cpu"), ("--quick",), 150, {
        "update's peak, over what it must have": Figure(lambda report: report["update"]["of_must"], 1.15),
    }),
    "weight_sync": Part("weight_sync", ("--engines", "embedded", "--rounds", "8"), ("--quick", "--engines", "embedded"), 90, {
        "float32, over memcpy": Figure(lambda report: float(report[0]["sync/memcpy"]), better="higher"),
        "bfloat16, over memcpy": Figure(lambda report: float(report[1]["sync/memcpy"]), better="higher"),
    }),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="a picture: each figure over its target")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    sys.exit(run({name: PARTS[name] for name in args.parts}, quick=args.quick, plot=args.plot))


def run(parts: Mapping[str, Part], *, quick: bool, plot: Path | None = None, root: Path = ROOT) -> int:
    """Run all parts; return the exit code."""
    results = {}
    print(f"| {'part':11} | {'figure':50} | {'value':>9} | {'target':>9} | |\n|---|---|---|---|---|", file=sys.stderr)
    for name, part in parts.items():
        results[name] = measured(part, quick=quick, root=root)
        print("\n".join(lines(name, part, results[name])), file=sys.stderr, flush=True)
    print(json.dumps({"parts": results, "load": os.getloadavg(), "cores": len(os.sched_getaffinity(0))}, indent=1))
    if plot is not None:
        draw(parts, results, plot)
    return int(any(result["error"] for result in results.values()))


def measured(part: Part, *, quick: bool, root: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Result of a part: its figures by name, error (one line, or None) and seconds. environment: further variables."""
    started = time.monotonic()
    result: dict[str, Any] = {"figures": {}, "error": None}
    try:
        result["report"] = report = run_bench(part, part.quick if quick else part.words, root, environment)
        result["figures"] = {name: float(figure.of(report)) for name, figure in part.figures.items()}
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return result | {"seconds": round(time.monotonic() - started, 1)}


def run_bench(part: Part, words: tuple[str, ...], root: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Report of a bench of the tree at ``root``. Raises RuntimeError if it fails or exceeds its limit; leaves no process."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(environment or {})
    bench = subprocess.Popen(
        [sys.executable, "-m", f"scripts.bench.{part.bench}", *words], cwd=root, env=variables, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    RUNNING.add(bench)
    try:
        out, err = bench.communicate(timeout=part.seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {part.seconds:g} s") from None
    finally:
        RUNNING.discard(bench)
        end(bench)
    if bench.returncode:
        lines = err.strip().splitlines() or ["no word"]
        print(f"{part.bench} wrote last:", *lines[-LAST_LINES:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"exit code {bench.returncode}: {lines[-1]}")
    return parse_report(out)


def end(bench: "subprocess.Popen[str]") -> None:
    """Kill the bench and all processes of its session."""
    try:
        os.killpg(bench.pid, signal.SIGKILL)
    except ProcessLookupError:  # the whole session has ended
        return
    bench.wait()


def parse_report(out: str) -> Any:
    """JSON, possibly preceded by other output; or the rows of a table."""
    start = 0 if out.startswith("{") else out.find("\n{") + 1
    return json.loads(out[start:]) if out.startswith("{", start) else rows_of(out)


def rows_of(table: str) -> list[dict[str, str]]:
    """Rows of a Markdown table, by column title."""
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def lines(name: str, part: Part, result: Mapping[str, Any]) -> list[str]:
    if result["error"]:
        return [f"| {name:11} | FAILED after {result['seconds']} s: {result['error']}"]
    rows = []
    for title, value in result["figures"].items():
        figure = part.figures[title]
        over = figure.over_target(value)
        target = "" if figure.target is None else f"{'<=' if figure.better == 'lower' else '>='} {figure.target:g}"
        rows.append(f"| {name:11} | {title:50} | {value:9.4g} | {target:>9} | {'missed' if over and over > 1 else ''} |")
    return rows


def draw(parts: Mapping[str, Part], results: Mapping[str, Any], path: Path) -> None:
    """Draw a bar for each figure that has a target: its cost over the target's."""
    import matplotlib.pyplot as plt

    bars = {
        f"{name}: {title}": over
        for name, result in results.items()
        for title, value in result["figures"].items()
        if (over := parts[name].figures[title].over_target(value)) is not None
    }
    figure, pane = plt.subplots(figsize=(9, 0.6 + 0.35 * len(bars)), layout="constrained")
    pane.barh(list(bars), list(bars.values()), color=["#b5482f" if over > 1 else "#3b7d6e" for over in bars.values()])
    pane.axvline(1.0, color="black", linewidth=1)
    pane.invert_yaxis()
    pane.set_xlabel("of what the target allows; less is better")
    pane.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    main()
