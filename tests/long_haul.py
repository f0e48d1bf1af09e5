"""A long run, observed from outside. The run: ``python -m tests.long_haul NOTES main_ppo's arguments``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.layout.source import ROOT
from trainer.run.run_dir import METRICS

EMPTY_SECONDS = 10.0  # Ray frees unreferenced objects in batches


@dataclass(frozen=True, slots=True)
class Process:
    rss: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """step: the last one in the log. processes: by role. logs, ray_logs: bytes of logs/ and of Ray's own."""

    step: int
    processes: dict[str, Process]
    logs: int
    ray_logs: int


def watch(arguments: Sequence[str], run_dir: Path, notes: Path) -> list[Sample]:
    """Run to completion, sampling twice per second. notes: a file that gets the content of the object store at the end."""
    with (notes.with_suffix(".output")).open("w+") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "tests.long_haul", str(notes), *arguments], cwd=ROOT, stdout=output, stderr=output
        )
        samples = []
        while run.poll() is None:
            samples.append(look(psutil.Process(run.pid), run_dir))
            time.sleep(0.5)
        output.seek(0)
        assert run.returncode == 0, output.read()[-4000:]
    return samples


def look(driver: psutil.Process, run_dir: Path) -> Sample:
    found: dict[str, Process] = {}
    step = (run_dir / METRICS).read_bytes().count(b"\n") - 1 if (run_dir / METRICS).exists() else 0
    with suppress(psutil.NoSuchProcess):
        for process in [driver, *driver.children(recursive=True)]:
            with suppress(psutil.Error):
                found[role_of(process, driver)] = Process(process.memory_info().rss, process.num_fds(), process.num_threads())
    return Sample(step, found, size(run_dir / "logs"), size(run_dir / "ray" / "session_latest" / "logs"))


def role_of(process: psutil.Process, driver: psutil.Process) -> str:
    """driver, worker, or the beginning of its command line."""
    if process.pid == driver.pid:
        return "driver"
    words = process.cmdline() or [process.name()]  # empty while it starts and after its end
    if words[0].startswith("ray::RayExecutor"):
        return "worker"
    return next((Path(word).stem for word in words if "/ray/" in word or "trainer" in word), words[0]) + f" {process.pid}"


def size(folder: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # removed since it was listed
                total += path.stat().st_size if path.is_file() else 0
    return total


def main(notes: str, *arguments: str) -> int:
    """Everything goes through the object store, however small; its content at the end of the run is recorded."""
    from ray._private.internal_api import get_memory_info_reply
    from ray._private.state import state

    from trainer import main_ppo
    from workers.controller.ray import ray_backend

    end_ray = ray_backend.end_ray

    def note_and_end_ray(places: Sequence[str]) -> None:
        deadline = time.monotonic() + EMPTY_SECONDS
        while (store := get_memory_info_reply(state).store_stats).num_local_objects and time.monotonic() < deadline:
            time.sleep(0.1)
        found = {
            "bytes": store.object_store_bytes_used,
            "objects": store.num_local_objects,
            "made": store.cumulative_created_objects,
        }
        Path(notes).write_text(json.dumps(found))
        end_ray(places)

    ray_backend.end_ray = note_and_end_ray
    ray_backend.INLINE_BYTES = 0
    return main_ppo.PROGRAM(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
