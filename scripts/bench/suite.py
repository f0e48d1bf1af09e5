"""The whole suite on two CPU cores in ten minutes: a table on stderr, JSON on stdout, and a plot.

    python scripts/bench/suite.py --plot suite.svg > suite.json
    python scripts/bench/suite.py --parts step dispatch
    python scripts/bench/suite.py --quick                    # smoke versions, whose figures mean nothing

Each part is a bench of its own, with a time limit, after the other. One that fails, is late, or lacks a figure is told of in the
table and the JSON, and the exit code is 1. A figure that misses its target is marked: that is no failure.
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
LAST_LINES = 30  # of a bench that failed


@dataclass(frozen=True, slots=True)
class Figure:
    """of: from what the bench said. target: at most; where higher is better, at least."""

    of: Callable[[Any], float]
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"

    def cost(self, value: float) -> float:
        """Less is better."""
        return value if self.better == "lower" else 1.0 / value

    def over_target(self, value: float) -> float | None:
        """Cost over that of the target: above 1 is a miss."""
        return None if self.target is None else self.cost(value) / self.cost(self.target)


@dataclass(frozen=True, slots=True)
class Part:
    """A bench: its module below scripts.bench and its words, those of its smoke version, and the seconds that it may take."""

    bench: str
    words: tuple[str, ...]
    quick: tuple[str, ...]
    seconds: float
    figures: Mapping[str, Figure]


def controller(said: Any, workers: int, sequences: int) -> dict[str, float]:
    """What the controller took with so many workers (-1: the most) and sequences, or the number that is nearest."""
    most = max(case["workers"] for case in said["steps"]) if workers < 0 else workers
    cases = [case for case in said["steps"] if case["workers"] == most]
    return min(cases, key=lambda case: abs(case["sequences"] - sequences))


def flatness(said: Any, workers: int) -> float:
    """Cost a token with the most sequences, over that with the fewest."""
    return controller(said, workers, 1 << 30)["us_per_token"] / controller(said, workers, 0)["us_per_token"]


def gemm(said: Any, shape: str, part: str) -> float:
    return next(case for name, case in said["cases"].items() if name.startswith(shape))["parts"][part]["of_gemm"]


TINY = ("--prompts", "2", "--n", "2", "--steps", "2", "--hidden_size", "64", "--num_hidden_layers", "1", "trainer.backend=local")
PARTS = {
    "dispatch": Part("dispatch", ("--workers", "1", "64", "--megabytes", "500"), ("--quick",), 150, {
        "controller, us a token": Figure(lambda said: controller(said, said["settings"]["workers"][0], 4096)["us_per_token"]),
        "cost a token, most over fewest sequences": Figure(lambda said: flatness(said, said["settings"]["workers"][0]), 1.5),
        "most workers, 1,024 sequences: % of 10 s": Figure(lambda said: controller(said, -1, 1024)["percent_of_10_s"], 2.0),
        "bytes into and out of the store, over the batch's": Figure(
            lambda said: said["store"]["stored_over_bytes"] + said["store"]["read_over_bytes"], 2.01
        ),
    }),
    "step": Part("step", ("--steps", "4"), TINY, 120, {
        "GRPO step, 3.4M, s": Figure(lambda said: said["seconds"]["step"]),
        "outside generate, log-prob, update": Figure(lambda said: said["share_outside_generate_log_prob_update"]),
    }),
    "rollout": Part(
        "rollout", ("--workload", "ragged", "--engines", "embedded", "--rounds", "3", "--hf_batch_sizes", "64"),
        ("--quick", "--workload", "ragged", "--engines", "embedded"), 150, {
        "ragged answers, tokens a CPU second": Figure(
            lambda said: said["workloads"]["ragged"]["tokens_per_cpu_second"]["embedded"], better="higher"
        ),
    }),
    "train": Part("train", ("--shapes", "84m", "--dtypes", "float32", "--rounds", "1"), ("--quick",), 240, {
        "forward, of GEMM": Figure(lambda said: gemm(said, "", "forward"), 0.8, "higher"),
        "forward and backward, of GEMM": Figure(lambda said: gemm(said, "", "f+b"), 0.8, "higher"),
        "padding": Figure(lambda said: next(iter(said["cases"].values()))["padding_waste"], 0.02),
    }),
    "memory": Part("memory", ("--shape", "vocabulary", "--device", "cpu"), ("--quick",), 150, {
        "update's peak, over what it must have": Figure(lambda said: said["update"]["of_must"], 1.15),
    }),
    "weight_sync": Part("weight_sync", ("--engines", "embedded", "--rounds", "8"), ("--quick", "--engines", "embedded"), 90, {
        "float32, over memcpy": Figure(lambda said: float(said[0]["sync/memcpy"]), better="higher"),
        "bfloat16, over memcpy": Figure(lambda said: float(said[1]["sync/memcpy"]), better="higher"),
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
    """All of them; the exit code."""
    results = {}
    print(f"| {'part':11} | {'figure':50} | {'value':>9} | {'target':>9} | |\n|---|---|---|---|---|", file=sys.stderr)
    for name, part in parts.items():
        results[name] = measured(part, quick=quick, root=root)
        print("\n".join(lines(name, part, results[name])), file=sys.stderr, flush=True)
    print(json.dumps({"parts": results, "load": os.getloadavg(), "cores": len(os.sched_getaffinity(0))}, indent=1))
    if plot is not None:
        draw(parts, results, plot)
    return int(any(result["error"] for result in results.values()))


def measured(part: Part, *, quick: bool, root: Path) -> dict[str, Any]:
    """figures: by name. error: why they are not there, in a line; None. seconds: that it took."""
    started = time.monotonic()
    result: dict[str, Any] = {"figures": {}, "error": None}
    try:
        result["said"] = said = ask(part, part.quick if quick else part.words, root)
        result["figures"] = {name: float(figure.of(said)) for name, figure in part.figures.items()}
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return result | {"seconds": round(time.monotonic() - started, 1)}


def ask(part: Part, words: tuple[str, ...], root: Path) -> Any:
    """What the bench says, of the tree at ``root``. Raises RuntimeError if it fails or is late; it leaves no process."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    bench = subprocess.Popen(
        [sys.executable, "-m", f"scripts.bench.{part.bench}", *words], cwd=root, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = bench.communicate(timeout=part.seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {part.seconds:g} s") from None
    finally:
        end(bench)
    if bench.returncode:
        lines = err.strip().splitlines() or ["no word"]
        print(f"{part.bench} wrote last:", *lines[-LAST_LINES:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"exit code {bench.returncode}: {lines[-1]}")
    return said_in(out)


def end(bench: "subprocess.Popen[str]") -> None:
    """With what it has started in its session."""
    try:
        os.killpg(bench.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, and all of them
        return
    bench.wait()


def said_in(out: str) -> Any:
    """JSON, after whatever words; or the rows of a table."""
    start = 0 if out.startswith("{") else out.find("\n{") + 1
    return json.loads(out[start:]) if out.startswith("{", start) else rows_of(out)


def rows_of(table: str) -> list[dict[str, str]]:
    """Of a table in Markdown."""
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def lines(name: str, part: Part, result: Mapping[str, Any]) -> list[str]:
    if result["error"]:
        return [f"| {name:11} | FAILED after {result['seconds']} s: {result['error']}"]
    told = []
    for title, value in result["figures"].items():
        figure = part.figures[title]
        over = figure.over_target(value)
        target = "" if figure.target is None else f"{'<=' if figure.better == 'lower' else '>='} {figure.target:g}"
        told.append(f"| {name:11} | {title:50} | {value:9.4g} | {target:>9} | {'missed' if over and over > 1 else ''} |")
    return told


def draw(parts: Mapping[str, Part], results: Mapping[str, Any], path: Path) -> None:
    """A bar for each figure that has a target: how much of it is used up."""
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
