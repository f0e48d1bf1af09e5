"""Hang reports: the ranks that block a phase, a directory with stacks and logs, and a ten-line summary for the user.

``verdict`` uses the strongest evidence first: a dead process, a stopped process, torch's flight recorder, then Python stacks.
A rank whose collective timed out is the first to report an error but not the cause: it waited for the ranks that are late.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import workers
from workers.controller.flight_recorder import Records, in_words, ranks_in_words, read_records, stragglers
from workers.controller.logs import NCCL_TIMEOUT
from workers.controller.process_inspection import ProcessState, RankState
from workers.controller.stacks import Frame, frames_by_thread

CONTROLLER = -1
"""Stands for a rank: the process that runs the loop."""
SHOWN_RANKS = 4
RAY_LINES = 20
GPU_SECONDS = 10.0
_SOURCE = Path(workers.__file__).parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MEETINGS = ("rendezvous_store", "join_process_group", "run_collective")
"""Functions of workers/roles/worker.py and workers/rollout/sync/channel.py in which ranks also wait for each other."""
_COLLECTIVE_ENDED = re.compile(rf"[Tt]imed out waiting \d+ ?ms for|{NCCL_TIMEOUT}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ranks that block the others, as far as the evidence shows it, and the reason."""

    ranks: list[int]
    why: str


@dataclass(frozen=True, slots=True)
class Stall:
    """A phase that exceeded its limit. work: by rank, what it worked on; empty if that is unknown."""

    step: int
    phase: str
    states: Sequence[RankState]
    work: Sequence[str]
    verdict: Verdict


def verdict(states: Sequence[RankState], waited: Collection[int] = ()) -> Verdict:
    """Find the ranks that block the others.

    waited: ranks that reported a collective which the others did not join. NCCL's watchdog ends the process of such a rank.
    """
    waited = {*waited, *(state.rank for state in states if any(NCCL_TIMEOUT in line for line in state.last_lines))}
    # Except ranks that NCCL's watchdog ended: they were waiting.
    if dead := [state.rank for state in states if state.processes and state.processes[0].dead and state.rank not in waited]:
        return Verdict(dead, "its process is dead")
    if stopped := [state.rank for state in states if any(process.stopped for process in state.processes)]:
        return Verdict(stopped, "a process of it is stopped (SIGSTOP, or a debugger)")
    if (found := stragglers(records_of(states))) is not None:
        return Verdict(*found)
    waiting = [state.rank for state in states if state.rank in waited or (not state.answered and waits_for_others(state))]
    others = [state for state in states if state.rank not in waiting]
    working = [state for state in others if not state.answered]
    late = [state.rank for state in working]
    # Stacks show who waits in a collective: the ranks elsewhere are the cause, those that still work first.
    if waiting and late:
        return Verdict(late, f"it is in no collective, and {ranks_in_words(waiting)} in one")
    if waiting and others:
        return Verdict([state.rank for state in others], f"it has ended its call, and {ranks_in_words(waiting)} in a collective")
    if waiting:
        return Verdict(unlike_the_others(states), "all wait in collectives: not in the same one, or the network is down")
    odd = unlike_the_others(working)
    if len(odd) < len(late) / 2:  # in kernels of an engine's own NCCL (vLLM's), which neither stacks nor the recorder show
        return Verdict(odd, "it is elsewhere than the others")
    return Verdict(late, "")


def records_of(states: Sequence[RankState]) -> dict[int, Records]:
    """Flight records, by rank, of the ranks whose recorder answered."""
    processes = {state.rank: state.processes[0] for state in states if state.processes}
    return {rank: read_records(process.collectives) for rank, process in processes.items() if process.collectives}


def unlike_the_others(states: Sequence[RankState]) -> list[int]:
    """Ranks whose position in the code is the least common."""
    places = [where(state.processes[0]) if state.processes else "" for state in states]
    fewest = min(map(places.count, places), default=0)
    return [state.rank for state, place in zip(states, places, strict=True) if places.count(place) == fewest]


def ended_in_collective(message: str) -> bool:
    """Whether an error message is that of a collective that timed out."""
    return _COLLECTIVE_ENDED.search(message) is not None


def waits_for_others(state: RankState) -> bool:
    """Whether a thread of the rank's own process is in a collective."""
    threads = frames_by_thread(state.processes[0].stacks) if state.processes else []
    return any(innermost_is_collective(frames) for frames in threads)


def innermost_is_collective(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frame, apart from torch's wrappers, belongs to a collective or a rendezvous."""
    inner = [frame for frame in frames if "/torch/_ops.py" not in frame.file and "/torch/utils/" not in frame.file]
    return bool(inner) and ("/torch/distributed/" in inner[0].file or inner[0].function in _MEETINGS)


def where(process: ProcessState) -> str:
    """Innermost frame of Tandem's or the user's code in the main thread: ``file:line in function``.

    Without such a frame the innermost one; "" if the process gives no stacks.
    """
    threads = frames_by_thread(process.stacks)
    frames = threads[-1] if threads else []
    for frame in frames:
        path = Path(frame.file)
        if path.is_relative_to(_SOURCE / "workers") or path.is_relative_to(_SOURCE / "trainer"):
            return f"{path.relative_to(_SOURCE)}:{frame.line} in {frame.function}"
        if not frame.file.startswith((*_LIBRARIES, "<")):
            return f"{frame.file}:{frame.line} in {frame.function}"
    return f"{frames[0].file}:{frames[0].line} in {frames[0].function}" if frames else ""


def record(stall: Stall, run_dir: Path) -> Path:
    """Write everything that is known below <run_dir>/logs. Returns the directory."""
    directory = free_directory(run_dir / "logs", f"stall_{stall.step}_{stall.phase}")
    directory.mkdir(parents=True)
    for state in stall.states:
        name = name_of(state.rank).replace(" ", "_")
        (directory / f"{name}.txt").write_text(of_rank(stall, state), encoding="utf-8")
        if state.processes and state.processes[0].collectives:
            (directory / f"{name}_collectives.json").write_text(state.processes[0].collectives, encoding="utf-8")
    memory = [*machine_memory(run_dir), *process_memory(stall.states), *gpu_memory()]
    (directory / "memory.txt").write_text("\n".join(memory) + "\n", encoding="utf-8")
    (directory / "ray.txt").write_text("\n".join(ray_lines(run_dir)) + "\n", encoding="utf-8")
    (directory / "summary.txt").write_text(summary(stall, run_dir, str(directory)) + "\n", encoding="utf-8")
    return directory


def summary(stall: Stall, run_dir: Path, directory: str) -> str:
    """About ten lines: phase, step, blocking ranks, their position and work, memory, and the directory with details."""
    blamed = stall.verdict.ranks
    lines = [f"step {stall.step}, phase {stall.phase}"]
    if blamed and stall.verdict.why:
        lines += [f"held up by {', '.join(map(name_of, blamed))}: {stall.verdict.why}"]
    # Blamed ranks first, then those without an answer.
    order = sorted(stall.states, key=lambda state: (state.rank not in blamed, state.answered, state.rank))
    records = records_of(order[:SHOWN_RANKS])
    for state in order[:SHOWN_RANKS]:
        lines += [line_of(stall, state), *(f"  {line}" for line in in_words(records.get(state.rank, {})))]
        lines += [
            f"  its child {child.pid} is {child.status}: {child.command:.80}" for child in state.processes[1:] if child.stopped
        ]
    if len(order) > SHOWN_RANKS:
        lines += [f"... and {len(order) - SHOWN_RANKS} more ranks"]
    lines += machine_memory(run_dir)[:1]
    lines += [f"last line of {state.log}: {state.last_lines[-1]:.200}" for state in order[:1] if state.last_lines]
    return "\n".join([*lines, f"stacks, memory, logs: {directory}"])


def line_of(stall: Stall, state: RankState) -> str:
    """Position and work of one rank, in one line."""
    place = where(state.processes[0]) if state.processes else ""
    at = "has answered" if state.answered else f"is at {place}" if place else "does not say where it is"
    process = f" (process {state.processes[0].pid}, {state.processes[0].status})" if state.processes else ""
    work = f"; worked on {work_of(stall, state.rank)}" if work_of(stall, state.rank) else ""
    return f"{name_of(state.rank)}{process} {at}{work}"


def name_of(rank: int) -> str:
    return "controller" if rank == CONTROLLER else f"rank {rank}"


def work_of(stall: Stall, rank: int) -> str:
    # CONTROLLER is -1, and its work is the only entry.
    return stall.work[max(rank, 0)] if stall.work else ""


def of_rank(stall: Stall, state: RankState) -> str:
    """Details of one rank: stacks or wait states of all its processes, and the last lines of its log."""
    parts = [f"step {stall.step}, phase {stall.phase}: {line_of(stall, state)}"]
    for process in state.processes:
        parts += [
            f"--- process {process.pid}, {process.status}, {process.rss / 2**20:.0f} MB: {process.command}",
            process.stacks.rstrip() or "\n".join(["no Python stacks; its threads wait in", *process.waits_in]),
            *filter(None, [process.native.rstrip()]),
        ]
    parts += [f"--- last lines of {state.log}", *(state.last_lines or ["(none)"])] if state.log is not None else []
    return "\n".join(parts) + "\n"


def machine_memory(run_dir: Path) -> list[str]:
    """Memory, /dev/shm, the run directory's disk and swap of this machine."""
    memory, shared, disk = psutil.virtual_memory(), shutil.disk_usage("/dev/shm"), shutil.disk_usage(run_dir)
    return [
        f"memory: {gigabytes(memory.available)} of {gigabytes(memory.total)} GB available, /dev/shm {gigabytes(shared.free)} of "
        f"{gigabytes(shared.total)} GB free, disk {gigabytes(disk.free)} GB free",
        f"swap: {gigabytes(psutil.swap_memory().used)} GB used",
    ]


def gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f}"


def process_memory(states: Sequence[RankState]) -> Iterator[str]:
    for state in states:
        for process in state.processes:
            yield f"{name_of(state.rank)}: process {process.pid}: {process.rss / 2**20:.0f} MB: {process.command:.100}"


def gpu_memory() -> list[str]:
    """Output of nvidia-smi, which may hang on a faulty GPU and cannot be killed then: it is not waited for any longer."""
    if shutil.which("nvidia-smi") is None:
        return []
    process = subprocess.Popen(["nvidia-smi"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=GPU_SECONDS)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        return [f"nvidia-smi has not answered in {GPU_SECONDS:g} s"]


def ray_lines(run_dir: Path) -> Iterator[str]:
    """Last lines of the logs of this run's own Ray instance: of the node's daemons, and of Ray in this process."""
    logs = run_dir / "ray" / "session_latest" / "logs"
    for pattern in ("raylet.*", "gcs_server.*", "python-core-driver-*"):
        for path in sorted(logs.glob(pattern)):
            if lines := path.read_text(errors="replace").splitlines()[-RAY_LINES:]:
                yield f"--- {path.name}"
                yield from lines


def free_directory(parent: Path, name: str) -> Path:
    """A name that is not in use: the same phase of the same step may have stalled before."""
    path, number = parent / name, 2
    while path.exists():
        path, number = parent / f"{name}_{number}", number + 1
    return path
