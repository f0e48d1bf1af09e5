"""What is kept of a phase that ran out of time: who holds it up, a directory with all that is known, and ten lines for people."""

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
"""In place of a rank: the process that runs the loop."""
TOLD_RANKS = 4
RAY_LINES = 20
GPU_SECONDS = 10.0
_OURS = Path(workers.__file__).parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MEETINGS = ("meeting_point", "meet_others", "wait_for_others")
"""workers/roles/worker.py, workers/rollout/sync/channel.py: there ranks wait for one another too."""
_COLLECTIVE_ENDED = re.compile(rf"[Tt]imed out waiting \d+ ?ms for|{NCCL_TIMEOUT}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who holds the others up, as far as their stacks show it, and why one thinks so."""

    ranks: list[int]
    why: str


@dataclass(frozen=True, slots=True)
class Stall:
    """work: by rank, what it worked on; empty where that is not told."""

    step: int
    phase: str
    states: Sequence[RankState]
    work: Sequence[str]
    verdict: Verdict


def verdict(states: Sequence[RankState], waited: Collection[int] = ()) -> Verdict:
    """waited: ranks that have told of a collective that nobody else came to. NCCL's watchdog ends such a rank's process."""
    waited = {*waited, *(state.rank for state in states if any(NCCL_TIMEOUT in line for line in state.last_lines))}
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
    if waiting and late:
        return Verdict(late, f"it is in no collective, and {ranks_in_words(waiting)} in one")
    if waiting and others:
        return Verdict([state.rank for state in others], f"it has ended its call, and {ranks_in_words(waiting)} in a collective")
    if waiting:
        return Verdict(unlike_the_others(states), "all wait in collectives: not in the same one, or the network is down")
    odd = unlike_the_others(working)
    if len(odd) < len(late) / 2:  # in kernels of an engine's own NCCL (vLLM's): neither stacks nor the recorder show it
        return Verdict(odd, "it is elsewhere than the others")
    return Verdict(late, "")


def records_of(states: Sequence[RankState]) -> dict[int, Records]:
    """Of the ranks whose recorder answered."""
    processes = {state.rank: state.processes[0] for state in states if state.processes}
    return {rank: read_records(process.collectives) for rank, process in processes.items() if process.collectives}


def unlike_the_others(states: Sequence[RankState]) -> list[int]:
    """The ranks that are where the fewest are."""
    places = [where(state.processes[0]) if state.processes else "" for state in states]
    fewest = min(map(places.count, places), default=0)
    return [state.rank for state, place in zip(states, places, strict=True) if places.count(place) == fewest]


def ended_in_collective(said: str) -> bool:
    """Whether this is the error of a collective that ran out of time."""
    return _COLLECTIVE_ENDED.search(said) is not None


def waits_for_others(state: RankState) -> bool:
    """Whether a thread of the rank's own process is in a collective."""
    threads = frames_by_thread(state.processes[0].stacks) if state.processes else []
    return any(innermost_is_collective(frames) for frames in threads)


def innermost_is_collective(frames: Sequence[Frame]) -> bool:
    inner = [frame for frame in frames if "/torch/_ops.py" not in frame.file and "/torch/utils/" not in frame.file]
    return bool(inner) and ("/torch/distributed/" in inner[0].file or inner[0].function in _MEETINGS)


def where(process: ProcessState) -> str:
    """The innermost frame of ours, or of the user's, in its main thread: ``file:line in function``; "" if it gives no stacks."""
    threads = frames_by_thread(process.stacks)
    frames = threads[-1] if threads else []
    for frame in frames:
        path = Path(frame.file)
        if path.is_relative_to(_OURS / "workers") or path.is_relative_to(_OURS / "trainer"):
            return f"{path.relative_to(_OURS)}:{frame.line} in {frame.function}"
        if not frame.file.startswith((*_LIBRARIES, "<")):
            return f"{frame.file}:{frame.line} in {frame.function}"
    return f"{frames[0].file}:{frames[0].line} in {frames[0].function}" if frames else ""


def record(stall: Stall, run_dir: Path) -> Path:
    """Write all that is known below <run_dir>/logs; the directory."""
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
    """About ten lines: phase, step, who, where, on what, memory, and where there is more."""
    blamed = stall.verdict.ranks
    lines = [f"step {stall.step}, phase {stall.phase}"]
    if blamed and stall.verdict.why:
        lines += [f"held up by {', '.join(map(name_of, blamed))}: {stall.verdict.why}"]
    order = sorted(stall.states, key=lambda state: (state.rank not in blamed, state.answered, state.rank))
    records = records_of(order[:TOLD_RANKS])
    for state in order[:TOLD_RANKS]:
        lines += [line_of(stall, state), *(f"  {line}" for line in in_words(records.get(state.rank, {})))]
        lines += [
            f"  its child {child.pid} is {child.status}: {child.command:.80}" for child in state.processes[1:] if child.stopped
        ]
    if len(order) > TOLD_RANKS:
        lines += [f"... and {len(order) - TOLD_RANKS} more ranks"]
    lines += machine_memory(run_dir)[:1]
    lines += [f"last line of {state.log}: {state.last_lines[-1]:.200}" for state in order[:1] if state.last_lines]
    return "\n".join([*lines, f"stacks, memory, logs: {directory}"])


def line_of(stall: Stall, state: RankState) -> str:
    place = where(state.processes[0]) if state.processes else ""
    at = "has answered" if state.answered else f"is at {place}" if place else "does not say where it is"
    process = f" (process {state.processes[0].pid}, {state.processes[0].status})" if state.processes else ""
    work = f"; worked on {work_of(stall, state.rank)}" if work_of(stall, state.rank) else ""
    return f"{name_of(state.rank)}{process} {at}{work}"


def name_of(rank: int) -> str:
    return "controller" if rank == CONTROLLER else f"rank {rank}"


def work_of(stall: Stall, rank: int) -> str:
    return stall.work[max(rank, 0)] if stall.work else ""


def of_rank(stall: Stall, state: RankState) -> str:
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
    """Of this machine: memory, /dev/shm and the run directory's disk."""
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
    """What nvidia-smi tells. Where a GPU is ill it may never answer, and cannot be killed: it is left alone then."""
    if shutil.which("nvidia-smi") is None:
        return []
    process = subprocess.Popen(["nvidia-smi"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=GPU_SECONDS)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        return [f"nvidia-smi has not answered in {GPU_SECONDS:g} s"]


def ray_lines(run_dir: Path) -> Iterator[str]:
    """The last lines of a Ray of our own: of its node's daemons, and of what it writes about this process."""
    logs = run_dir / "ray" / "session_latest" / "logs"
    for pattern in ("raylet.*", "gcs_server.*", "python-core-driver-*"):
        for path in sorted(logs.glob(pattern)):
            if lines := path.read_text(errors="replace").splitlines()[-RAY_LINES:]:
                yield f"--- {path.name}"
                yield from lines


def free_directory(parent: Path, name: str) -> Path:
    """The same phase of the same step may have stalled before."""
    path, number = parent / name, 2
    while path.exists():
        path, number = parent / f"{name}_{number}", number + 1
    return path
