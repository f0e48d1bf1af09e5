"""Runs that are killed, restarted with the same command until they complete, and compared with an uninterrupted run.

A run is a separate process: ``python -m tests.kills KILL FOLDER main_ppo's arguments``. It patches the program's phases and the
calls that move and remove files, and at the chosen moment kills itself and all its descendants with SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.layout.source import ROOT
from workers.controller.ray.ray_session import family

LIMIT = 300.0  # maximum seconds of one start of a run
BEGIN = 0  # denotes the time before the first step of a process
CHECKPOINT = r"global_step_\d+"
SAVING = ("write", "rename", "latest", "remove")  # while a checkpoint is written and completed: in the background


@dataclass(frozen=True, slots=True)
class Kill:
    """When a process is killed, and which one first.

    step: BEGIN, or a step. phase: a name of Phases; or, in this step or the first later one in which that happens,
    ``write``: half a file of a checkpoint is written (with backend=local); ``rename``: a checkpoint is on disk without its name;
    ``latest``: it has its name, and latest_checkpointed_iteration.txt names another; ``remove``: an old one is half removed.
    moment: of a phase: seconds after its begin, but within it, or as it ends. first: the driver, and immediately the others;
    the workers, and immediately the others; or the driver ``alone``: the others have to end by themselves. backend:
    trainer.backend of that start; threads: see tests/threads.py. Or one worker alone, ``trainer`` or ``rollout``: the driver has
    to notice, and ends with code 1.
    """

    step: int
    phase: str
    moment: float | Literal["end"] = 0.0
    first: Literal["driver", "workers", "alone", "trainer", "rollout"] = "driver"
    backend: Literal["ray", "local", "threads"] = "ray"

    @property
    def spares_driver(self) -> bool:
        return self.first in ("trainer", "rollout")


@dataclass(frozen=True, slots=True)
class KilledRun:
    """Record of a killed process, written before its death. time: monotonic clock, shared by all processes. processes: (pid,
    creation time) of all processes of the run. ray: directories of its Ray. shm: its named files in /dev/shm.
    """

    time: float
    processes: list[tuple[int, float]]
    ray: list[str]
    shm: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: from the kill to the first step after it. killed: see KilledRun."""

    kill: Kill
    killed: KilledRun
    seconds: float


def run_and_kill(
    arguments: Sequence[str],
    run_dir: Path,
    kills: Sequence[Kill],
    folder: Path,
    *,
    last: Literal["ray", "local", "threads"] = "ray",
    python: str = sys.executable,
) -> list[Outcome]:
    """Start a run again and again until it completes; the k-th start is ended by kills[k]. folder: for records. last:
    trainer.backend of the start that completes. python: an interpreter, or tests.warm's stand-in for starts without Ray.
    """
    killed: list[KilledRun] = []
    begun: list[float | None] = []
    for number, kill in enumerate([*kills, None]):
        notes = folder / str(number)
        notes.mkdir(parents=True)
        backend = kill.backend if kill else last
        # Ray's processes are not forked from the stand-in.
        own = sys.executable if backend == "ray" else python
        code, message = start([*arguments, f"trainer.backend={backend}"], kill, notes, own)
        if kill is None:
            assert code == 0, f"the run does not complete:\n{message}"
        else:
            wanted = 1 if kill.spares_driver else -signal.SIGKILL
            assert code == wanted and (notes / "killed").exists(), f"{kill} was not reached, exit code {code}:\n{message}"
            assert not kill.spares_driver or "died: killed by a signal" in message
            found = json.loads((notes / "killed").read_text())
            killed.append(KilledRun(**found | {"processes": [tuple(process) for process in found["processes"]]}))
            end(killed[-1], at_once=kill.first in ("driver", "workers"))
        begun.append(float((notes / "begun").read_text()) if (notes / "begun").exists() else None)
    left = [path for one in killed for path in leftovers(run_dir, one)]
    assert left == [], left  # pytest explains assertions of test modules only
    steps = [next(time for time in begun[number + 1 :] if time is not None) for number in range(len(kills))]
    return [Outcome(kill, one, step - one.time) for kill, one, step in zip(kills, killed, steps, strict=True)]


def start(arguments: Sequence[str], kill: Kill | None, notes: Path, python: str) -> tuple[int, str]:
    """Return the exit code and the end of the output."""
    command = [python, "-m", "tests.kills", json.dumps(kill and asdict(kill)), str(notes), *arguments]
    with (notes / "output").open("w+") as message:
        code = subprocess.run(command, cwd=ROOT, stdout=message, stderr=subprocess.STDOUT, timeout=LIMIT).returncode
        message.seek(0)
        return code, message.read()[-4000:]


def end(killed: KilledRun, *, at_once: bool) -> None:
    """Wait until all processes of the run have ended. at_once: kill them here."""
    left = []
    for pid, made in killed.processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == made and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
                if at_once:
                    process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert alive == [], "outlived the run"


def leftovers(run_dir: Path, killed: KilledRun) -> list[str]:
    """Files of a killed process that the next start should have removed."""
    names = [path for pattern in (".ray-*", "ray", "**/*.incomplete", "**/*.partial") for path in run_dir.glob(pattern)]
    return [*map(str, names), *(path for path in (*killed.ray, *killed.shm) if Path(path).exists())]


# From here on: inside the process that is to be killed.


class KillHooks:
    """Kills this run at ``kill``, and records in ``notes`` when its first step began."""

    def __init__(self, kill: Kill | None, notes: Path, run_dir: Path) -> None:
        self.kill, self.notes, self.run_dir = kill, notes, run_dir
        self.step = BEGIN
        self.within: list[str] = []
        self.striking = threading.Lock()

    def steps(self, remaining_steps: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        @wraps(remaining_steps)
        def counted(*of_trainer: Any) -> Iterator[int]:
            for step in remaining_steps(*of_trainer):
                if self.step == BEGIN:
                    (self.notes / "begun").write_text(str(time.monotonic()))
                self.step = step
                yield step

        return counted

    def phases(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        """Validation has nested phases of the same names; they count as part of it."""

        @wraps(phase)
        @contextmanager
        def watched(phases: Any, name: str) -> Iterator[None]:
            is_due = self.is_due(name) and "testing" not in self.within
            with phase(phases, name):
                self.within.append(name)
                if is_due and self.kill is not None and self.kill.moment != "end":
                    self.kill_after(float(self.kill.moment))
                yield
                if is_due:
                    self.kill_now()
                self.within.pop()

        return watched

    def moves(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """os.rename and os.replace: before a checkpoint gets its name, and before the file that names the latest is moved."""
        from trainer.run.run_dir import LATEST

        @wraps(move)
        def watched(source: Any, target: Any, **where: Any) -> Any:
            name = os.path.basename(target)
            if (self.is_due("rename") and re.fullmatch(CHECKPOINT, name)) or (self.is_due("latest") and name == LATEST):
                self.kill_now()
            return move(source, target, **where)

        return watched

    def writes(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """write_tensors, in the thread that writes a checkpoint."""

        @wraps(write)
        def watched(path: Path, tensors: Any, metadata: Any) -> Any:
            if self.is_due("write"):
                path.write_bytes(b"half")
                self.kill_now()
            return write(path, tensors, metadata)

        return watched

    def removals(self, remove: Callable[..., Any]) -> Callable[..., Any]:
        """shutil.rmtree: one file of a checkpoint is removed, the others remain."""

        @wraps(remove)
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_due("remove") and re.search(CHECKPOINT, str(path)):
                next(file for file in sorted(Path(path).rglob("*")) if file.is_file()).unlink()
                self.kill_now()
            return remove(path, *args, **kwargs)

        return watched

    def is_due(self, phase: str) -> bool:
        if self.kill is None or self.kill.phase != phase:
            return False
        return self.step >= self.kill.step if phase in SAVING else self.step == self.kill.step

    def kill_after(self, seconds: float) -> None:
        if not seconds:
            self.kill_now()
        timer = threading.Timer(seconds, self.kill_now)
        timer.daemon = True
        timer.start()

    def kill_now(self) -> None:
        """Does not return, unless the driver is spared. The timer may call it when the phase ends."""
        assert self.kill is not None
        if not self.striking.acquire(blocking=not self.kill.spares_driver):
            return
        ray = [self.run_dir.absolute() / "ray"] if (self.run_dir / "ray").is_symlink() else []
        places = [*map(str, self.run_dir.glob(".ray-*")), *(str(Path(os.readlink(link)).parent) for link in ray)]
        actual = {process.pid: process for process in (*psutil.Process().children(recursive=True), *family(places))}.values()
        killed = KilledRun(
            time=time.monotonic(),
            processes=[(process.pid, process.create_time()) for process in actual if process.is_running()],
            ray=places,
            shm=sorted({path for process in actual for path in shared_memory(process)}),
        )
        (self.notes / "killed.partial").write_text(json.dumps(asdict(killed)))
        (self.notes / "killed.partial").rename(self.notes / "killed")
        if self.kill.spares_driver:
            pool = {"trainer": "actor", "rollout": "rollout"}[self.kill.first]
            log = self.run_dir / "logs" / f"rank_0_{pool}.log"
            os.kill(int(re.findall(r"^--- process (\d+)", log.read_text(), re.MULTILINE)[-1]), signal.SIGKILL)
            return
        if self.kill.first == "workers":
            for process in sorted(actual, key=lambda process: not is_worker(process)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        os.kill(os.getpid(), signal.SIGKILL)


def is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1]).startswith("ray::")
    return False


def shared_memory(process: psutil.Process) -> list[str]:
    """Mapped files in /dev/shm that still have a name."""
    with suppress(psutil.Error):
        return [part.path for part in process.memory_maps() if part.path.startswith("/dev/shm/") and Path(part.path).exists()]
    return []


def main(kill: str, notes: str, *arguments: str) -> int:
    from tests.threads import use_threads
    from trainer import main_ppo
    from trainer.harness import Trainer
    from trainer.rollout import remote_rollout
    from trainer.run.timing import Phases
    from workers.engine.hf import checkpoint

    wish = json.loads(kill)
    run_dir = next(word for word in reversed(arguments) if word.startswith("trainer.default_local_dir=")).partition("=")[2]
    if any(word.startswith("async_training.mode=") for word in arguments):
        remote_rollout.STEPS = 4  # so that short responses are in flight between steps
    if arguments[-1] == "trainer.backend=threads":
        use_threads(pytest.MonkeyPatch())
        arguments = (*arguments[:-1], "trainer.backend=ray")
    hooks = KillHooks(wish and Kill(**wish), Path(notes), Path(run_dir))
    Trainer.steps = hooks.steps(Trainer.steps)  # type: ignore[method-assign]
    Phases.__call__ = hooks.phases(Phases.__call__)  # type: ignore[method-assign]
    os.rename, os.replace = hooks.moves(os.rename), hooks.moves(os.replace)
    checkpoint.write_tensors = hooks.writes(checkpoint.write_tensors)
    shutil.rmtree = hooks.removals(shutil.rmtree)  # type: ignore[assignment]
    return main_ppo.PROGRAM(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
