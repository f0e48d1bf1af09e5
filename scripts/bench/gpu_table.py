"""What the parts of scripts/bench/gpu.sh measured, as one table.

python scripts/bench/gpu_table.py DIR takes each DIR/<part>.out, and writes what is JSON in it into DIR/<part>.json: models and
engines print too.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, str]]


def main() -> None:
    print("| part | what | figure |\n|---|---|---|")
    for path in sorted(Path(sys.argv[1]).glob("*.out")):
        if path.stem.startswith("model-"):  # it makes one, and measures nothing
            continue
        text, report = path.read_text(), path.with_suffix(".json")
        if (start := ("\n" + text).find("\n{\n")) >= 0:
            found, _ = json.JSONDecoder().raw_decode(text, start)
            report.write_text(json.dumps(found, indent=1))
        else:  # a bench that writes the file itself
            found = json.loads(report.read_text())
        for what, figure in KINDS[path.stem.partition("-")[0]](found):
            print(f"| {path.stem} | {what} | {figure} |")


def train(found: dict[str, Any]) -> Rows:
    for name, case in found["cases"].items():
        for part, measured in case["parts"].items():
            peak = "" if measured["of_peak"] is None else f", {measured['of_peak']:.1%} of the device's peak"
            yield f"{name}, {part}", f"{measured['tokens_per_second']:.0f} tokens/s, {measured['of_gemm']:.1%} of GEMM{peak}"
        yield f"{name}, padding", f"{case['padding_waste']:.2%} of the tokens"
        if case["gigabytes"] is not None:
            yield f"{name}, peak", f"{case['gigabytes']:.1f} GB"


def memory(found: dict[str, Any]) -> Rows:
    for phase, measured in found["phases"].items():
        yield f"{phase}, bytes", ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in measured.items())
    yield "update beside what it must have", f"{found['update']['of_must']:.3f} x"


def sync(found: dict[str, Any]) -> Rows:
    for name, measured in found["seconds"].items():
        yield name, f"{measured['seconds']:.4f} s, {measured['GB/s']:.1f} GB/s"
    last = found["cycles"][-1]
    yield "sleep frees", f"{(last['awake'] - last['asleep']) / 1e9:.3f} GB, {last['share freed']:.1%} of what the engine holds"
    yield "sleep, and waking the cache", f"{last['sleep seconds']:.4f} s, {last['wake cache seconds']:.4f} s"
    yield "peak of a sync above trainer and weights", f"{last['peak above trainer and weights'] / 1e9:.3f} GB"


def step(found: dict[str, Any]) -> Rows:
    yield "tokens per second", f"{found['tokens_per_s']:.0f}"
    yield "MFU", "unknown" if found["mfu"] is None else f"{found['mfu']:.1%}"
    yield "seconds", ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["seconds"].items())


def engines(found: dict[str, Any]) -> Rows:
    for case, measured in found.items():
        if case != "settings":
            yield case, ", ".join(f"{name} {value}" for name, value in measured.items())


def compare(found: dict[str, Any]) -> Rows:
    yield "report", json.dumps(found)


KINDS = {"train": train, "memory": memory, "sync": sync, "step": step, "engines": engines, "compare": compare}


if __name__ == "__main__":
    main()
