"""Test whether a revision is slower than another: exit code 1 and a line per figure that is, beyond noise; 2 if a bench fails.

    python scripts/bench/gate.py main HEAD                                # whole GRPO steps, five rounds
    python scripts/bench/gate.py v0.1 HEAD --bench step rollout --rounds 8 --tolerance 0.05
    python scripts/bench/gate.py main HEAD --history gate.jsonl           # and what has added up over the revisions in this file

Both are checked out side by side, both with HEAD's scripts/bench, so that they are measured in the same way. A round runs a bench
of the suite once on each; the one that starts alternates, so that drift affects both. Each round gives one ratio per figure, HEAD
over BASE.

The rule (a sign test): a figure is slower if the median of its ratios is above 1 + tolerance, and the number of ratios above 1
has a probability of at most 1/20 for fair coins (5 of 5, 7 of 8); and if the same holds in as many new rounds, which are run only
then. Without a difference a ratio is as likely above 1 as below: with five rounds the false positive rate of a figure is at most
1/1024 (1/32 twice), whatever the noise, and lower because of the tolerance. A slowdown is detected if it is larger than the noise
of a round; more rounds detect smaller ones.

--history: changes below the tolerance pass each time, and add up. The medians of each run are appended to the file, as a line of
JSON. Runs of which each begins at the revision where the one before ended are a chain, and the products of their medians are
printed. They fail nothing: the noise adds up too.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from math import comb, prod
from pathlib import Path
from typing import Any

from scripts.bench.suite import PARTS, ROOT, Part, run_bench

Ratios = dict[str, dict[str, list[float]]]
"""Of each round, by bench and figure."""
CHANCE = 1 / 20
FEWEST = 5
"""Rounds: with fewer, the test cannot be significant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head")
    parser.add_argument("--bench", nargs="+", choices=PARTS, default=["step"], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=FEWEST, help=f"at least {FEWEST} (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="(default: %(default)s)")
    parser.add_argument("--history", type=Path, help="file of earlier results, which may be new")
    args = parser.parse_args()
    if args.rounds < FEWEST:
        parser.error(f"--rounds {args.rounds}: fewer than {FEWEST} cannot tell noise from a difference")
    parts = {name: PARTS[name] for name in args.bench}
    try:
        found, problems = gate(ROOT, args.base, args.head, parts, rounds=args.rounds, tolerance=args.tolerance)
        added_up = [] if args.history is None else keep(args.history, ROOT, args.base, args.head, found)
    except RuntimeError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:  # git has printed the reason
        parser.error(f"{' '.join(error.cmd)}: ended with {error.returncode}")
    for line in (*added_up, *(f"slower: {problem}" for problem in problems)):
        print(line, file=sys.stderr)
    sys.exit(bool(problems))


def gate(
    repository: Path, base: str, head: str, parts: Mapping[str, Part], *, rounds: int, tolerance: float
) -> tuple[Ratios, list[str]]:
    """Ratios, and one line for each figure of the benches that is slower at ``head``. Prints the ratios to stdout, as JSON."""
    with checked_out(repository, base, head) as (old, new):
        found = {name: ratios(part, old, new, rounds) for name, part in parts.items()}
        for name, part in parts.items():
            if suspects := [title for title, of in found[name].items() if is_slower(of, tolerance)]:
                print(f"{name}: {', '.join(suspects)}: once more", file=sys.stderr)
                again = ratios(part, old, new, rounds)
                for title in found[name]:
                    found[name][title] += again[title]
    print(json.dumps({"base": base, "head": head, "ratios": found, "load": os.getloadavg()}, indent=1))
    return found, [
        f"{name}, {title}: {statistics.median(of):.3f} x of {base} (of {len(of)} rounds {min(of):.3f} to {max(of):.3f})"
        for name, titles in found.items()
        for title, of in titles.items()
        if len(of) > rounds and is_slower(of[:rounds], tolerance) and is_slower(of[rounds:], tolerance)
    ]


def keep(history: Path, repository: Path, base: str, head: str, found: Ratios) -> list[str]:
    """Append the medians to ``history``; one line for each figure of the chain that ends here, if it has several runs."""
    known = [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []
    begin, end = (git(repository, "rev-parse", f"{revision}^{{commit}}").strip() for revision in (base, head))
    medians = {name: {title: statistics.median(of) for title, of in titles.items()} for name, titles in found.items()}
    chain: list[dict[str, Any]] = [
        {"date": datetime.now().isoformat(timespec="seconds"), "base": begin, "head": end, "medians": medians}
    ]
    with history.open("a") as file:
        file.write(json.dumps(chain[0]) + "\n")
    for earlier in reversed(known):
        if earlier["head"] == chain[-1]["base"]:
            chain.append(earlier)
    lines = []
    for name, title in ((name, title) for name, titles in medians.items() for title in titles):
        factors = [run["medians"][name][title] for run in chain if title in run["medians"].get(name, {})]
        if len(factors) > 1:
            lines.append(
                f"{name}, {title}: {prod(factors):.3f} x since {chain[-1]['base'][:8]}, the product of {len(factors)} runs"
            )
    return lines


def ratios(part: Part, old: Path, new: Path, rounds: int) -> dict[str, list[float]]:
    """Cost of each figure at ``new`` over its cost at ``old``, one ratio per round."""
    found: dict[str, list[float]] = {title: [] for title in part.figures}
    for number in range(rounds):
        order = (old, new) if number % 2 == 0 else (new, old)
        reports = {tree: run_bench_at(tree, part) for tree in order}
        for title, figure in part.figures.items():
            costs = {tree: figure.cost(float(figure.of(reports[tree]))) for tree in order}
            found[title].append(costs[new] / costs[old])
            print(f"{part.bench}, {title}, round {number + 1}: {found[title][-1]:.3f}", file=sys.stderr, flush=True)
    return found


def run_bench_at(tree: Path, part: Part) -> Any:
    """suite.run_bench with the name of the tree in its error."""
    try:
        return run_bench(part, part.words, tree)
    except RuntimeError as error:
        raise RuntimeError(f"{part.bench} at {tree.name.upper()}: {error}") from None


def is_slower(ratios: Sequence[float], tolerance: float) -> bool:
    """True if the median is above 1 + tolerance and a one-sided sign test on the ratios is significant."""
    above, n = sum(ratio > 1 for ratio in ratios), len(ratios)
    by_chance = sum(comb(n, heads) for heads in range(above, n + 1)) / 2**n
    return statistics.median(ratios) > 1 + tolerance and by_chance <= CHANCE


@contextmanager
def checked_out(repository: Path, base: str, head: str) -> Iterator[tuple[Path, Path]]:
    """Work trees of both revisions, both with head's benches. Raises CalledProcessError for a revision that does not exist."""
    with tempfile.TemporaryDirectory() as folder:
        trees = Path(folder, "base"), Path(folder, "head")
        try:
            for tree, revision in zip(trees, (base, head), strict=True):
                git(repository, "worktree", "add", "--quiet", "--detach", str(tree), revision)
            benches = [tree / "scripts" / "bench" for tree in trees]
            shutil.rmtree(benches[0], ignore_errors=True)
            shutil.copytree(benches[1], benches[0])
            yield trees
        finally:
            for tree in trees:
                if tree.exists():
                    git(repository, "worktree", "remove", "--force", str(tree))


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
