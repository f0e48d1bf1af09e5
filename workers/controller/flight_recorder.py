"""Collectives of running processes, read from outside through torch's flight recorder, and the ranks that block others.

Problem: a collective of NCCL returns as soon as it is enqueued, so the Python stack of a rank that waits in its kernel shows
a later line. Idea: torch records every collective with its number in its process group, and all ranks of a group count alike.
A rank whose numbers end before the one in which others wait has not entered it. No watchdog of NCCL has to expire first, and
no process is ended. Cost: a ring buffer and one thread per worker, which waits for a byte on a pipe; the reader opens the
pipe and the answer, an anonymous file, through /proc/<pid>/fd.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

ENTRIES = "2000"  # of the ring buffer: torch's own default where the recorder is on by default
# The second is the older name; the first takes precedence.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
KEPT_ENTRIES = 20  # latest entries of each group, in addition to those in flight
ANSWER_SECONDS = 2.0
POLL_SECONDS = 0.02
_NAME = "tandem-collectives-{pid}-{ask}"  # with the pid: a forked child inherits the file and must not be taken for its parent
_LINK = re.compile(r"/memfd:tandem-collectives-(\d+)-(\d+) \(deleted\)")
_EQUAL_SIZES = ("all_reduce", "all_gather", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce", "barrier")
"""Collectives that need an input of the same size on every rank."""


@cache
def enable_collective_reports() -> None:
    """Start the thread of this process that answers ``collectives_of``.

    Call it before the first process group is created: the recorder reads its size only once. The thread needs the GIL: there
    is no answer while an extension holds it. torch's collectives release it.
    """
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = ENTRIES
    asked, ask = os.pipe()
    memory = os.memfd_create(_NAME.format(pid=os.getpid(), ask=ask))
    threading.Thread(target=_answer, args=(asked, memory), name="collectives", daemon=True).start()


def _answer(asked: int, memory: int) -> None:
    while os.read(asked, 1):
        os.write(memory, json.dumps(recorded()).encode() + b"\n")


def recorded() -> dict[str, Any]:
    """Dump of torch's recorder by backend: the latest collectives of each process group, and all that are in flight."""
    if "torch" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import is_nccl_available

    dumps = {}
    dumps["gloo"] = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    if is_nccl_available():  # NCCL has a recorder of its own
        dumps["nccl"] = json.loads(c10d._dump_nccl_trace_json())  # type: ignore[attr-defined]
    return {backend: {**dump, "entries": _latest(dump["entries"])} for backend, dump in dumps.items() if dump.get("entries")}


def _latest(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest KEPT_ENTRIES of each group and all that are in flight, in the order in which they were recorded."""
    kept, seen = [], dict[str, int]()
    for entry in reversed(entries):
        group = entry["process_group"][0]
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= KEPT_ENTRIES or not _ended(entry):
            kept.append(entry)
    return kept[::-1]


def _ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective has ended.

    gloo has no events whose completion the recorder could observe: it retires the collectives that have ended. NCCL also
    retires those that it has given up, so their state decides.
    """
    return bool(entry["retired"]) if entry["profiling_name"].startswith("gloo:") else entry["state"] == "completed"


def collectives_of(pid: int) -> str:
    """Output of ``recorded`` in a process of this machine, as JSON; "" if it does not answer."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            found = _LINK.fullmatch(os.readlink(entry.path))
            # A forked child has its parent's file open as well, but no thread that answers: compare the pid.
            if found is not None and int(found[1]) == pid:
                return _asked(Path(entry.path), Path(f"/proc/{pid}/fd/{found[2]}"))
    except OSError:  # the process has ended, or belongs to another user
        pass
    return ""


def _asked(memory: Path, ask: Path) -> str:
    """Request a dump through the pipe ``ask`` and read it from ``memory``; "" if it is not complete after ANSWER_SECONDS."""
    said, deadline = b"", time.monotonic() + ANSWER_SECONDS
    with memory.open("rb") as file:
        # Skip earlier answers, and only then ask.
        file.seek(0, os.SEEK_END)
        ask.write_bytes(b"?")
        while not said.endswith(b"\n") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            said += file.read()
    return said.splitlines()[-1].decode() if said.endswith(b"\n") else ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's record of a collective.

    number: counted per group. elements: (of all inputs, of all outputs). state: in torch's terms scheduled (enqueued),
    started (only with TORCH_NCCL_ENABLE_TIMING=1) or completed.
    """

    operation: str
    number: int
    group: str
    dtype: str
    elements: tuple[int, int]
    state: str
    created: int
    """Nanoseconds since 1970, by the clock of this rank."""

    def __str__(self) -> str:
        inputs, outputs = self.elements
        size = f"{inputs:,} elements" + (f" in, {outputs:,} out" if inputs != outputs else "")
        return f"{self.operation} #{self.number} of group {self.group}" + (f" ({self.dtype}, {size})" if self.dtype else "")

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal on all ranks of a correct program: the operation, with dtype and input size where these have to match."""
        same_size = self.operation in _EQUAL_SIZES
        return (self.operation, self.dtype, self.elements[0]) if same_size else (self.operation,)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One rank's collectives of one process group.

    members: ranks; empty if the recorder does not know them (gloo). entered: number of the last collective that this rank has
    entered. completed: the last that has completed. in_flight: the first that has not.
    """

    members: tuple[int, ...]
    entered: int
    completed: Collective | None
    in_flight: Collective | None


GroupName = tuple[str, str]
"""(backend, torch's name of the process group)."""
Records = dict[GroupName, GroupRecord]
"""Process groups of one rank."""


def read_records(dump: str) -> Records:
    """Parse the output of ``collectives_of``. Raises ValueError for anything else."""
    return {
        (backend, group): _group_record(group, content)
        for backend, content in json.loads(dump).items()
        for group in dict.fromkeys(entry["process_group"][0] for entry in content["entries"])
    }


def _group_record(group: str, content: Mapping[str, Any]) -> GroupRecord:
    """State of one process group according to a dump.

    Collectives of a group complete in order: those before a completed one have ended, whatever their own entries say (the
    parts of a coalesced collective have no events). Sends and receives are numbered separately and are ignored.
    """
    entries = [entry for entry in content["entries"] if entry["process_group"][0] == group and not entry["is_p2p"]]
    ended = [entry for entry in entries if _ended(entry)]
    last = max(ended, key=lambda entry: entry["collective_seq_id"], default=None)
    rest = [entry for entry in entries if last is None or entry["collective_seq_id"] > last["collective_seq_id"]]
    first = min(rest, key=lambda entry: entry["collective_seq_id"], default=None)
    return GroupRecord(
        tuple(json.loads(content["pg_config"].get(group, {}).get("ranks", "[]"))),
        max((entry["collective_seq_id"] for entry in entries), default=0),
        _collective(last),
        _collective(first),
    )


def _collective(entry: Mapping[str, Any] | None) -> Collective | None:
    if entry is None:
        return None
    name, description = entry["process_group"]
    dtypes = dict.fromkeys(entry["input_dtypes"] + entry["output_dtypes"])
    return Collective(
        entry["profiling_name"].rpartition(":")[2],
        entry["collective_seq_id"],
        description or name,
        "/".join(dtypes).lower(),
        (_elements(entry["input_sizes"]), _elements(entry["output_sizes"])),
        "completed" if _ended(entry) else entry["state"],
        entry["time_created_ns"],
    )


def _elements(sizes: Iterable[Sequence[int]]) -> int:
    """Number of elements of all tensors with these sizes."""
    return sum(map(prod, sizes))


def stragglers(records: Mapping[int, Records]) -> tuple[list[int], str] | None:
    """Find the ranks that block the others: (ranks, reason), or None if the records do not show it.

    records: by rank, of those that answered; no other rank is blamed.

    A rank waits for the members of a group that have not entered its collective in flight. The cause is a rank that others
    wait for and that waits for no rank itself; in a cycle, any rank of it. If several collectives are blocked in this way,
    one is reported. If every rank has entered, the cause is a different operation or size under the same number.
    """
    waits: dict[int, dict[int, tuple[GroupName, int]]] = {}
    for rank, groups in records.items():
        for key, group in groups.items():
            if group.in_flight is not None:
                number = group.in_flight.number
                # The recorder does not know the members of a gloo group: use the ranks that have a record of it.
                members = group.members or [other for other, theirs in records.items() if key in theirs]
                behind = [member for member in members if member in records and _entered(records[member], key) < number]
                waits.setdefault(rank, {}).update(dict.fromkeys(behind, (key, number)))
    waited_for = sorted({member for behind in waits.values() for member in behind})
    # If rank 0 waits for rank 1 and rank 1 for rank 2, only rank 2 is the cause. A cycle leaves none: then all are kept.
    causes = [rank for rank in waited_for if not waits.get(rank)] or waited_for
    if not causes:
        return _mismatch(records)
    key, number = next(behind[causes[0]] for behind in waits.values() if causes[0] in behind)
    waiting = sorted(rank for rank, behind in waits.items() if (key, number) in behind.values())
    collective = records[waiting[0]][key].in_flight
    assert collective is not None
    ranks = [rank for rank in causes if any(behind.get(rank) == (key, number) for behind in waits.values())]
    return ranks, f"it has not entered {collective}, where {ranks_in_words(waiting)}"


def _entered(records: Records, key: GroupName) -> int:
    """Number of the last collective of group ``key`` that a rank has entered; 0: none."""
    return records[key].entered if key in records else 0


def _mismatch(records: Mapping[int, Records]) -> tuple[list[int], str] | None:
    """Find ranks in a different collective, where all have entered: those with the least common operation or size."""
    for key in dict.fromkeys(key for groups in records.values() for key in groups):
        flying = {rank: groups[key].in_flight for rank, groups in records.items() if key in groups}
        ranks_in: dict[tuple[Any, ...], list[int]] = {}
        for rank, one in flying.items():
            if one is not None:
                ranks_in.setdefault((one.number, *one.signature), []).append(rank)
        # Operations can be compared only under the same number.
        if len(ranks_in) > 1 and len({number for number, *_ in ranks_in}) == 1:
            fewest = min(map(len, ranks_in.values()))
            odd = sorted(rank for ranks in ranks_in.values() if len(ranks) == fewest for rank in ranks)
            where = ", ".join(f"{ranks_in_words(ranks)} in {flying[ranks[0]]}" for ranks in ranks_in.values())
            return odd, f"not the same collective: {where}"
    return None


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"


def in_words(records: Records) -> Iterator[str]:
    """One line for each group with a collective in flight; if there is none, one for the last collective that completed."""
    for group in records.values():
        if group.in_flight is not None:
            last = f"; last completed: {group.completed}" if group.completed is not None else ""
            yield f"in flight: {group.in_flight}, {group.in_flight.state}{last}"
    completed = [group.completed for group in records.values() if group.completed is not None]
    if completed and not any(group.in_flight for group in records.values()):
        yield f"no collective in flight; last completed: {max(completed, key=lambda one: one.created)}"
