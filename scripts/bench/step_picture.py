"""Picture of a step in docs/concepts.md, from a run: the phases of a worker, and the contents of its memory over time.

    python scripts/bench/step_picture.py measure docs/step.json    # 86M parameters on the CPU, some minutes
    python scripts/bench/step_picture.py draw docs/step.json docs/step.svg

The worker is this process (trainer.backend=local). It is sampled every few milliseconds: bytes of each role's weights, gradients
and moments, of the rollout engine's own weights and of its cache. The remaining memory of the process, less the minimum of that
remainder in the step, counts as activations. Freed memory is returned to the system at once (MALLOC_TRIM_THRESHOLD_), so that the
picture shows it. GB is 10^9 bytes.
"""

import argparse
import html
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import psutil
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.bench.step import Workload, arguments, make_task
from trainer.main_ppo import PROGRAM
from workers.roles.worker import Worker

WORK = Workload(
    prompts=8, n=4, prompt_length=64, response_length=96, hidden_size=768, num_hidden_layers=12, intermediate_size=2048,
    vocab=5504, steps=2,
)  # fmt: skip
QUICK = Workload(prompts=8, n=4, prompt_length=16, response_length=48, hidden_size=64, num_hidden_layers=2, steps=2)
RETURNED_AT_ONCE = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "262144"}
LOOK_SECONDS = 0.004
# Stacked areas, from below: name, label in the legend, colour.
PARTS = (
    ("actor", "actor: weights", "#4477aa"),
    ("moments", "actor: optimizer", "#66a0c8"),
    ("ref", "reference: weights", "#8c7bb8"),
    ("gradients", "gradients", "#cc6677"),
    ("activations", "activations", "#ddaa55"),
    ("engine", "engine: weights", "#228866"),
    ("cache", "engine: cache", "#66bb99"),
)
# Phases that are drawn: label, and the part that works in it.
PHASES = {
    "gen": ("generate", "engine"), "reward": ("score", "controller"), "old_log_prob": ("log-probs", "actor"),
    "ref": ("ref", "ref"), "adv": ("advantages", "controller"), "update_actor": ("update", "gradients"),
    "sync": ("sync", "cache"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="what", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("numbers", type=Path)
    measuring.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    drawing = verbs.add_parser("draw")
    drawing.add_argument("numbers", type=Path)
    drawing.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    if args.what == "draw":
        args.picture.write_text(draw(json.loads(args.numbers.read_text())))
    else:
        args.numbers.write_text(json.dumps(measure(QUICK if args.quick else WORK), separators=(",", ":")) + "\n")


def measure(work: Workload) -> dict[str, Any]:
    """Last step of a run: spans [phase, start, end] in seconds from its start, and looks [second, MB of each of PARTS]."""
    with tempfile.TemporaryDirectory() as folder, watched() as looks, redirect_stdout(sys.stderr):
        task = make_task(work, Path(folder), seed=0)
        settings = [
            "trainer.backend=local", "reward.num_workers=0", "actor_rollout_ref.rollout.dtype=bfloat16",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts // 2}", "data.shuffle=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", "actor_rollout_ref.rollout.verify_weights=sample",
        ]  # fmt: skip
        mine = {word.partition("=")[0] for word in settings}
        words = [word for word in arguments(work, task, Path(folder) / "run") if word.partition("=")[0] not in mine]
        code = PROGRAM([*words, *settings])
        assert code == 0, "the run failed"
        parameters = AutoModelForCausalLM.from_pretrained(task["model"]).num_parameters()
        spans = json.loads((Path(folder) / "run/timeline.jsonl").read_text().splitlines()[-1])["spans"]
    begin, end = next((start, end) for phase, _, start, end in spans if phase == "step")
    inside = [(second - begin, sizes) for second, sizes in looks if begin <= second <= end]
    assert inside, "the step ended before the first sample"
    own = min(sizes["process"] - sum(sizes[name] for name, *_ in PARTS if name in sizes) for _, sizes in inside)
    rows = []
    for second, sizes in inside:
        known = sum(sizes[name] for name, *_ in PARTS if name in sizes)
        whole = sizes | {"activations": max(0, sizes["process"] - known - own)}
        rows.append([round(second, 3), *(round(whole[name] / 1e6, 1) for name, *_ in PARTS)])
    drawn = sorted(
        ([phase, round(a - begin, 3), round(b - begin, 3)] for phase, _, a, b in spans if phase in PHASES), key=lambda s: s[1]
    )
    return {
        "parameters": parameters, "answers": work.prompts * work.n, "tokens": work.prompt_length + work.response_length,
        "seconds": round(end - begin, 3), "spans": drawn, "looks": thinned(rows, 240),
    }  # fmt: skip


@contextmanager
def watched() -> Iterator[list[tuple[float, dict[str, int]]]]:
    """Samples of the worker that is made within: (seconds since 1970, bytes by part; process: its whole size).

    Use it in the main thread: only that thread can read tensors that it may be about to free, so a timer interrupts it.
    """
    workers: list[Worker] = []
    looks: list[tuple[float, dict[str, int]]] = []
    sizes: list[dict[str, int]] = []
    ended, made, process = Event(), Worker.__init__, psutil.Process()

    def remember(self: Worker, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        workers.append(self)

    def weigh(number: int, frame: FrameType | None) -> None:
        if workers and has_all_roles(workers[-1]):
            sizes[:] = [held(workers[-1])]

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            for known in sizes[:]:
                looks.append((time.time(), known | {"process": process.memory_info().rss}))

    Worker.__init__ = remember  # type: ignore[method-assign]
    before = signal.signal(signal.SIGPROF, weigh)
    signal.setitimer(signal.ITIMER_PROF, LOOK_SECONDS, LOOK_SECONDS)
    watcher = Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield looks
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        ended.set()
        watcher.join()
        Worker.__init__ = made  # type: ignore[method-assign]


def has_all_roles(worker: Worker) -> bool:
    return {"actor", "ref", "rollout"} <= worker.roles.keys()


def held(worker: Worker) -> dict[str, int]:
    """Bytes of each named part of the worker's memory."""
    residents, engine = worker.memory_scheduler._resident_models, worker.roles["rollout"].rollout
    actor, ref = residents["actor"].engine, residents["ref"].engine
    return {
        "actor": nbytes(actor._params.values()),
        "moments": nbytes(actor._optimizer.moments().values()),
        "ref": nbytes(ref._params.values()),
        "gradients": nbytes(param.grad for param in actor._params.values() if param.grad is not None),
        "engine": engine.model.owned_bytes,
        "cache": engine.cache.nbytes,
    }


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def thinned(rows: list[list[float]], most: int) -> list[list[float]]:
    """At most ``most`` rows: of each group of neighbours the one with the most memory."""
    group = -(-len(rows) // most)
    return [max(rows[i : i + group], key=lambda row: sum(row[1:])) for i in range(0, len(rows), group)]


WIDTH, LEFT, RIGHT, BARS, TOP, HEIGHT = 900, 62, 196, 58, 112, 250
COLOURS = {name: colour for name, _, colour in PARTS} | {"controller": "#8a8f98"}
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px; fill: #59636e } .on { fill: #ffffff; font-size: 12px }
  .axis { stroke: #59636e } .grid { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    .card { fill: #15191f; stroke: #3d444d } text { fill: #f0f6fc } .small { fill: #9198a1 } .on { fill: #ffffff }
    .axis { stroke: #9198a1 } .grid { stroke: #2c333b }
  }
"""


def draw(numbers: dict[str, Any]) -> str:
    """SVG with its own background, readable on light and dark pages."""
    seconds, looks = numbers["seconds"], numbers["looks"]
    most = max(sum(look[1:]) for look in looks)
    tick = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if most / size <= 6)
    right, bottom = WIDTH - RIGHT, TOP + HEIGHT

    def x(second: float) -> float:
        return round(LEFT + (right - LEFT) * second / seconds, 1)

    def y(megabytes: float) -> float:
        return round(bottom - HEIGHT * megabytes / (most * 1.04), 1)

    model = (
        f"{numbers['parameters'] / 1e6:.0f}M parameters"
        if numbers["parameters"] > 1e6
        else f"{numbers['parameters']:,} parameters"
    )
    title = f"One GRPO step on a CPU: {model}, {numbers['answers']} answers, {numbers['tokens']} tokens each with the prompt"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 48}" role="img">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 47}" rx="6"/>',
        f'<text x="{LEFT}" y="28">{title}</text>',
    ]
    for phase, start, end in numbers["spans"]:
        label, works = PHASES[phase]
        wide = x(end) - x(start)
        out.append(f'<rect x="{x(start)}" y="{BARS}" width="{max(wide, 1):.1f}" height="30" fill="{COLOURS[works]}"/>')
        if wide > 7 * len(label):
            out.append(f'<text class="on" x="{x(start) + wide / 2:.1f}" y="{BARS + 19}" text-anchor="middle">{label}</text>')
        else:
            out.append(f'<text class="small" x="{x(start):.1f}" y="{BARS - 6}" text-anchor="middle">{label}</text>')
    for step in range(int(most * 1.04 // tick) + 1):
        height = y(step * tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height}" y2="{height}"/>')
        out.append(f'<text class="small" x="{LEFT - 8}" y="{height + 4}" text-anchor="end">{step * tick / 1000:g} GB</text>')
    below = [0.0] * len(looks)
    for i, (_, label, colour) in enumerate(PARTS, 1):
        above = [low + look[i] for low, look in zip(below, looks, strict=True)]
        edge = [f"{x(look[0])},{y(high)}" for look, high in zip(looks, above, strict=True)]
        back = [f"{x(look[0])},{y(low)}" for look, low in zip(reversed(looks), reversed(below), strict=True)]
        out.append(f'<polygon fill="{colour}" points="{" ".join(edge + back)}"/>')
        line = bottom - 22 * (i - 1) - 14
        out.append(f'<rect x="{right + 18}" y="{line - 11}" width="13" height="13" fill="{colour}"/>')
        out.append(f'<text x="{right + 38}" y="{line}">{html.escape(label)}</text>')
        below = above
    for phase, start, end in numbers["spans"]:
        if PHASES[phase][0] in ("generate", "log-probs", "ref", "update", "sync"):
            out += [
                f'<line class="grid" x1="{x(t)}" x2="{x(t)}" y1="{BARS + 30}" y2="{bottom}" stroke-dasharray="2 3"/>'
                for t in (start, end)
            ]
    out.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    between = next(size for size in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if seconds / size <= 12)
    for step in range(int(seconds / between) + 1):
        out.append(
            f'<text class="small" x="{x(step * between)}" y="{bottom + 18}" text-anchor="middle">{step * between:g}</text>'
        )
    out.append(f'<text class="small" x="{(LEFT + right) / 2}" y="{bottom + 37}" text-anchor="middle">seconds</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    if "measure" in sys.argv and not RETURNED_AT_ONCE.items() <= os.environ.items():
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | RETURNED_AT_ONCE
        )  # read at the process's start
    main()
