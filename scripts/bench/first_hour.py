"""A new user's first task: from trainer.main_init to a held-out gain, for three tasks that the repository does not have, as JSON.

    python scripts/bench/first_hour.py                       # three tasks, seeds 1 2 3: half an hour on two idle cores
    python scripts/bench/first_hour.py --tasks brackets --seeds 1 --out first_hour.jsonl

A run is appended to --out as it ends, as one line of JSON, so that an interrupted table keeps what it has measured.

Each task is what a user would type: main_init, an edit of its functions (EDITS), and the commands of the README that was written.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Task -> template, and functions that replace those of its task.py.
EDITS: dict[str, tuple[str, str]] = {
    "arithmetic": (
        "own",
        """
def make_problem(random):
    a, b, c = (random.randrange(10) for _ in range(3))
    sign = random.choice("+-")
    return f"{a}+{b}{sign}{c}=", str(a + b + c if sign == "+" else a + b - c)


def score(response, answer):
    return float(response.strip() == answer)
""",
    ),
    "brackets": (
        "own",
        """
def make_problem(random):
    pairs, opened, text = {"(": ")", "[": "]", "{": "}"}, [], ""
    for _ in range(random.randrange(4, 11)):
        if opened and random.random() < 0.4:
            text += pairs[opened.pop()]
        else:
            opened.append(random.choice("([{"))
            text += opened[-1]
    return f"{text} ", "".join(pairs[bracket] for bracket in reversed(opened)) or "-"
""",
    ),
    # Players take 1 to 3 sticks in turn; who takes the last one wins. The warm start has random moves: training learns to win.
    "sticks": (
        "chat",
        '''
def make_problem(random):
    sticks = random.randrange(6, 13)
    return f"{sticks}", f"{sticks} {random.random()}"


def play(spoken, known):
    """Sticks that are left, and whether the model won (None: not decided; False: it lost, or its move is not allowed)."""
    left, random = int(known.split()[0]), Random(known)
    for move in spoken:
        if move not in ("1", "2", "3") or int(move) > left:
            return left, False
        left -= int(move)
        if not left:
            return left, True
        left -= left if left <= 3 else random.randrange(1, 4)
        if not left:
            return left, False
    return left, None


def reply(spoken, known):
    left, won = play(spoken, known)
    return f"{left}", float(won is True), won is not None


def example(random, spoken, known):
    left, _ = play(spoken, known)
    return str(random.randrange(1, min(left, 3) + 1))
''',
    ),
}


def edited(source: str, functions: str) -> str:
    """task.py with these functions in the place of its own of the same names; others are added before them."""
    for function in re.split(r"\n\n\n(?=def )", functions.strip()):
        name = re.match(r"def (\w+)", function)
        assert name is not None
        old = re.search(rf"^def {name[1]}\(.*?(?=^(?:def|class|if) )", source, re.DOTALL | re.MULTILINE)
        if old is None:
            source = source.replace("\ndef make_problem", f"\n{function}\n\n\ndef make_problem", 1)
        else:
            source = source[: old.start()] + function + "\n\n\n" + source[old.end() :]
    return source


def commands(readme: str) -> list[list[str]]:
    """Words of the commands of a README."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (.*)$", readme, re.MULTILINE)]


def learn(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """Accuracy of held-out samples before and after training, and seconds from main_init to the end."""
    template, functions = EDITS[task]
    began = time.perf_counter()
    run(folder, ["python", "-m", "trainer.main_init", task, "--from", template])
    home = folder / task
    (home / "task.py").write_text(edited((home / "task.py").read_text(), functions))
    for words in commands((home / "README.md").read_text()):
        if "unittest" in words or "trainer.val_only=true" in words:  # the tests are the template's; the last validation counts
            continue
        seeded = {"task.py": "--seed", "data_preprocess.tiny_model": "--seed"}
        flags = [f"{flag}={seed}" for name, flag in seeded.items() if name in words]
        flags += [f"trainer.seed={seed}"] if "--config-name" in words else []
        run(home, [*words, *flags])
    lines = [json.loads(line) for line in (home / "runs/grpo/metrics.jsonl").read_text().splitlines()]
    curve = [(int(line["training/global_step"]), line["val/accuracy"]) for line in lines if "val/accuracy" in line]
    seconds = time.perf_counter() - began
    return {"task": task, "seed": seed, "before": curve[0][1], "after": curve[-1][1], "seconds": seconds, "curve": curve}


def run(folder: Path, words: Sequence[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="From trainer.main_init to a held-out gain")
    parser.add_argument("--tasks", nargs="+", choices=EDITS, default=list(EDITS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="file that each run is appended to, as a line of JSON")
    args = parser.parse_args(argv)
    rows = []
    for task in args.tasks:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(learn(task, seed, Path(folder)))
            row = rows[-1]
            print(
                f"{task} {seed}: {row['before']:.2f} -> {row['after']:.2f} in {row['seconds']:.0f} s", file=sys.stderr, flush=True
            )
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    gains = {task: statistics.median(row["after"] - row["before"] for row in rows if row["task"] == task) for task in args.tasks}
    print(json.dumps({"median_gain": gains, "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
