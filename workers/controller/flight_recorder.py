"""Collectives of living processes: torch's flight recorder, asked from outside, and the ranks that others wait for.

A collective of NCCL returns as soon as it is enqueued, so the Python stack of a rank that waits in its kernel shows some later
line. torch records every collective with its number in its process group. All ranks of a group count alike: a rank whose numbers
end before the one in which others wait has not entered it. No watchdog of NCCL has to expire first, and nothing is ended.
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

ENTRIES = "2000"  # of the ring buffer: torch's default since it is on by default
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name; the first wins
KEPT_ENTRIES = 20  # of each group, besides those in flight
ANSWER_SECONDS = 2.0
POLL_SECONDS = 0.02
_NAME = "tandem-collectives-{pid}-{ask}"  # with the id, so that a forked child is not taken for its parent
_LINK = re.compile(r"/memfd:tandem-collectives-(\d+)-(\d+) \(deleted\)")
_EQUAL_SIZES = ("all_reduce", "all_gather", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce", "barrier")
"""Collectives in which every rank must pass an input of the same size."""


@cache
def answer_for_collectives() -> None:
    """From now on a thread of this process answers collectives_of. Called before the first process group: the recorder reads
    its size once.

    The thread needs the interpreter's lock: while an extension holds it there is no answer. torch's collectives release it.
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
    """By backend, torch's dump of the recorder: the last collectives of each process group, and all that are in flight."""
    if "torch" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import is_nccl_available

    dumps = {}
    dumps["gloo"] = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    if is_nccl_available():  # a recorder of its own
        dumps["nccl"] = json.loads(c10d._dump_nccl_trace_json())  # type: ignore[attr-defined]
    return {backend: {**dump, "entries": _latest(dump["entries"])} for backend, dump in dumps.items() if dump.get("entries")}


def _latest(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order in which they were recorded."""
    kept, seen = [], dict[str, int]()
    for entry in reversed(entries):
        group = entry["process_group"][0]
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= KEPT_ENTRIES or not _ended(entry):
            kept.append(entry)
    return kept[::-1]


def _ended(entry: Mapping[str, Any]) -> bool:
    """gloo has no events whose completion the recorder could see: it retires what has ended. NCCL retires what it gave up too."""
    return bool(entry["retired"]) if entry["profiling_name"].startswith("gloo:") else entry["state"] == "completed"


def collectives_of(pid: int) -> str:
    """What ``recorded`` returns in this process of this machine, as JSON; "" if it does not answer."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            found = _LINK.fullmatch(os.readlink(entry.path))
            if found is not None and int(found[1]) == pid:
                return _asked(Path(entry.path), Path(f"/proc/{pid}/fd/{found[2]}"))
    except OSError:  # it is gone, or another user's
        pass
    return ""


def _asked(memory: Path, ask: Path) -> str:
    said, deadline = b"", time.monotonic() + ANSWER_SECONDS
    with memory.open("rb") as file:
        file.seek(0, os.SEEK_END)
        ask.write_bytes(b"?")
        while not said.endswith(b"\n") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            said += file.read()
    return said.splitlines()[-1].decode() if said.endswith(b"\n") else ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's record of a collective. number: counted by each group. elements: of all inputs, of all outputs. state: torch's
    word: scheduled (enqueued), started (only with TORCH_NCCL_ENABLE_TIMING=1), completed."""

    operation: str
    number: int
    group: str
    dtype: str
    elements: tuple[int, int]
    state: str
    created: int
    """Nanoseconds since 1970, of this rank's clock."""

    def __str__(self) -> str:
        inputs, outputs = self.elements
        size = f"{inputs:,} elements" + (f" in, {outputs:,} out" if inputs != outputs else "")
        return f"{self.operation} #{self.number} of group {self.group}" + (f" ({self.dtype}, {size})" if self.dtype else "")

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal on all ranks of a correct program."""
        same_size = self.operation in _EQUAL_SIZES
        return (self.operation, self.dtype, self.elements[0]) if same_size else (self.operation,)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One rank's collectives of one process group. members: ranks; none where the recorder does not know them (gloo).
    entered: the number of the last one that it has entered. in_flight: the first that has not completed."""

    members: tuple[int, ...]
    entered: int
    completed: Collective | None
    in_flight: Collective | None


GroupName = tuple[str, str]
"""(backend, torch's name of the process group)"""
Records = dict[GroupName, GroupRecord]
"""Of one rank."""


def read_records(dump: str) -> Records:
    """Raises ValueError if this is not what collectives_of returned."""
    return {
        (backend, group): _group_record(group, content)
        for backend, content in json.loads(dump).items()
        for group in dict.fromkeys(entry["process_group"][0] for entry in content["entries"])
    }


def _group_record(group: str, content: Mapping[str, Any]) -> GroupRecord:
    """Collectives of a group complete in their order: what comes before a completed one is over, whatever its own entry says
    (the parts of a coalesced collective have no events). Sends and receives count apart, and are left out."""
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
    return sum(map(prod, sizes))


def stragglers(records: Mapping[int, Records]) -> tuple[list[int], str] | None:
    """The ranks that hold the others up, and why; None if the records do not show it. records: by rank, of those that answered;
    the others are not judged.

    A rank waits for the members of a group that have not entered its collective in flight. Those that others wait for, and that
    wait for nobody themselves, are the cause; in a circle, any of them. Of several such collectives one is named. Where every
    rank has entered, the cause is another operation or size under the same number.
    """
    waits: dict[int, dict[int, tuple[GroupName, int]]] = {}
    for rank, groups in records.items():
        for key, group in groups.items():
            if group.in_flight is not None:
                number = group.in_flight.number
                members = group.members or [other for other, theirs in records.items() if key in theirs]
                behind = [member for member in members if member in records and _entered(records[member], key) < number]
                waits.setdefault(rank, {}).update(dict.fromkeys(behind, (key, number)))
    waited_for = sorted({member for behind in waits.values() for member in behind})
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
    return records[key].entered if key in records else 0


def _mismatch(records: Mapping[int, Records]) -> tuple[list[int], str] | None:
    """All have entered, and wait: the ranks whose operation, or size, is that of the fewest."""
    for key in dict.fromkeys(key for groups in records.values() for key in groups):
        flying = {rank: groups[key].in_flight for rank, groups in records.items() if key in groups}
        ranks_in: dict[tuple[Any, ...], list[int]] = {}
        for rank, one in flying.items():
            if one is not None:
                ranks_in.setdefault((one.number, *one.signature), []).append(rank)
        if len(ranks_in) > 1 and len({number for number, *_ in ranks_in}) == 1:
            fewest = min(map(len, ranks_in.values()))
            odd = sorted(rank for ranks in ranks_in.values() if len(ranks) == fewest for rank in ranks)
            where = ", ".join(f"{ranks_in_words(ranks)} in {flying[ranks[0]]}" for ranks in ranks_in.values())
            return odd, f"not the same collective: {where}"
    return None


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"


def in_words(records: Records) -> Iterator[str]:
    """One line for each group in which a rank has a collective in flight; or for the last collective that completed."""
    for group in records.values():
        if group.in_flight is not None:
            last = f"; last completed: {group.completed}" if group.completed is not None else ""
            yield f"in flight: {group.in_flight}, {group.in_flight.state}{last}"
    completed = [group.completed for group in records.values() if group.completed is not None]
    if completed and not any(group.in_flight for group in records.values()):
        yield f"no collective in flight; last completed: {max(completed, key=lambda one: one.created)}"
