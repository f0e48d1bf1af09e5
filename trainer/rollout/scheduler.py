"""Placement of rollout requests on engine replicas, turn by turn: a pure state machine without threads, Ray or clock.

Problem: responses have very different lengths. If every replica gets its share of the prompts before the first token, some are
idle long before the last one has finished. Idea: requests wait here, and a replica gets more of them as its own end. Requests
with one prompt go to one replica, which then computes the prompt once.

Reproducibility: where a request runs may change its log-probs in the last bit, so placement depends on nothing but the results of
whole turns. A turn is ``steps`` engine steps on every replica that has work; it ends when all of them have returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

Balance = Literal["tokens", "static"]
SHORT = 64.0  # tokens
RESERVE = 1.25
"""Requests per slot that a replica holds while responses are shorter than SHORT on average, so that slots are filled in a turn.

Longer responses leave few slots empty until the turn ends, and a step in which a request enters takes longer: vLLM leaves its
graph of decode steps (4 to 7 ms on an H200, 0.5B). Requests that enter between turns enter together.
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """Rows whose responses a replica completed in a turn, and the tokens of these responses."""

    rows: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with the same prompt. tokens: prompt tokens for each row, the prompt counted once."""

    rows: tuple[int, ...]
    tokens: float


class RolloutScheduler:
    """Distributes groups of rows that are admitted between turns.

    slots: sequences that a replica runs at the same time (max_num_seqs). max_tokens: of a response, its expected length until one
    has ended. balance: "static" gives all waiting groups away in a turn, in rotation.
    """

    def __init__(self, *, n_replicas: int, slots: int, max_tokens: int, balance: Balance) -> None:
        self._waiting: deque[_Group] = deque()
        self._running: list[dict[int, _Group]] = [{} for _ in range(n_replicas)]
        """By replica: the rows that it has, with their groups."""
        self._prompt_tokens = [0.0] * n_replicas
        """By replica: the prompts of these rows, each counted once."""
        self.replicas = list(range(n_replicas))
        """Those that were not lost."""
        self._called: set[int] = set()
        self._ready: set[int] = set()
        """Replicas that have rows and no call."""
        self._last: dict[int, int] = {}
        """Replica of the rows that ended."""
        self._n_placed = 0
        self._slots = slots
        self._mean_length = float(max_tokens)
        self._n_ended = self._ended_tokens = 0
        self._balance = balance

    @property
    def unfinished(self) -> int:
        """Number of rows that wait or run."""
        return sum(len(group.rows) for group in self._waiting) + sum(map(len, self._running))

    @property
    def waiting(self) -> bool:
        """Whether rows wait for a replica."""
        return bool(self._waiting)

    def held(self, replica: int) -> int:
        """Number of rows that a replica has."""
        return len(self._running[replica])

    def rows(self, replica: int) -> list[int]:
        """The rows that a replica has, in the order in which it got them."""
        return list(self._running[replica])

    def has(self, row: int) -> bool:
        """Whether a replica has the row."""
        return any(row in running for running in self._running)

    def admit(self, rows: Sequence[int], prompt_tokens: int) -> None:
        """Queue rows with the same prompt. Rows that ended before continue: their replica has computed most of the prompt."""
        self._waiting.append(_Group(tuple(rows), prompt_tokens / len(rows)))

    def record(self, ended: Mapping[int, Ended]) -> None:
        """Take the results of calls, by replica."""
        for replica, results in ended.items():
            self._called.remove(replica)
            for row in results.rows:
                self._prompt_tokens[replica] -= self._running[replica].pop(row).tokens
                self._last[row] = replica
            if self._running[replica]:
                self._ready.add(replica)
            self._n_ended += len(results.rows)
            self._ended_tokens += sum(results.lengths)
        if self._n_ended:
            self._mean_length = self._ended_tokens / self._n_ended

    def forget(self, rows: Collection[int]) -> dict[int, list[int]]:
        """Forget rows that wait, have ended, or are on a replica without a call; returns the latter, by replica."""
        left = ((tuple(row for row in group.rows if row not in rows), group.tokens) for group in self._waiting)
        self._waiting = deque(_Group(kept, tokens) for kept, tokens in left if kept)
        held: dict[int, list[int]] = {}
        for replica, running in enumerate(self._running):
            for row in [row for row in running if row in rows and replica not in self._called]:
                self._prompt_tokens[replica] -= running.pop(row).tokens
                held.setdefault(replica, []).append(row)
            if not running:
                self._ready.discard(replica)
        for row in rows:
            self._last.pop(row, None)
        return held

    def lose(self, replica: int) -> None:
        """Forget a replica that died, with its rows."""
        self.replicas.remove(replica)
        self._running[replica] = {}
        self._called.discard(replica)
        self._ready.discard(replica)

    def calls(self, also: Collection[int] = ()) -> dict[int, list[int]]:
        """Calls to start: by replica, the rows to be submitted (often none). A replica has one call at a time.

        also: replicas that need a call although they have no rows.
        """
        new: dict[int, list[int]] = {}
        if self._waiting:
            idle = [(self._outstanding(i), i) for i in self.replicas if i not in self._called]
            heapify(idle)
            while self._waiting and (replica := self._place(self._waiting[0], idle)) is not None:
                group = self._waiting.popleft()
                new.setdefault(replica, []).extend(group.rows)
                self._running[replica] |= dict.fromkeys(group.rows, group)
                self._prompt_tokens[replica] += group.tokens * len(group.rows)
                self._ready.add(replica)
                self._n_placed += 1
                heappush(idle, (self._outstanding(replica), replica))
        busy = sorted(self._ready.union(replica for replica in also if replica not in self._called))
        self._called.update(busy)
        self._ready.clear()
        return {replica: new.get(replica, []) for replica in busy}

    def _place(self, group: _Group, idle: list[tuple[float, int]]) -> int | None:
        """Replica for a group that is to be submitted now; None: it waits.

        idle: heap of replicas without a call by their outstanding tokens; outdated entries are dropped here.
        """
        last = self._last.get(group.rows[0])
        if last is not None and last in self.replicas and last not in self._called and self._fits(group, self.held(last)):
            return last
        if self._balance == "static":
            replica = self.replicas[self._n_placed % len(self.replicas)] if self.replicas else None
            return None if replica in self._called else replica
        full: list[tuple[float, int]] = []
        found = None
        while idle and found is None:
            tokens, replica = heappop(idle)
            if tokens != self._outstanding(replica):
                continue
            if self._fits(group, self.held(replica)):
                found = replica
            else:
                full.append((tokens, replica))
        for entry in full:
            heappush(idle, entry)
        return found

    def _fits(self, group: _Group, held: int) -> bool:
        """Whether a replica that has ``held`` rows takes a group."""
        most = int(RESERVE * self._slots) if self._mean_length < SHORT else self._slots
        # A group that is large compared with the slots would leave many of them empty if it waited until all of it fits.
        return held + len(group.rows) <= most or self._slots - held > self._slots // 16

    def _outstanding(self, replica: int) -> float:
        """Expected tokens of a replica's rows. What a response has so far says nothing about its rest: each counts fully."""
        return self._prompt_tokens[replica] + self._mean_length * len(self._running[replica])
