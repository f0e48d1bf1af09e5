"""Placement of rollout requests on engine replicas, turn by turn: a pure state machine without threads, Ray or clock.

Problem: responses have very different lengths. If every replica gets its share of the prompts before the first token, some are
idle long before the last one has finished. Idea: requests wait here, and a replica gets more of them as its own end. Requests
with one prompt go to one replica, which then computes the prompt once.

Reproducibility: where a request runs may change its log-probs in the last bit, so placement depends on nothing but the results of
whole turns. A turn is ``steps`` engine steps on every replica that has work; it ends when all of them have returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Balance = Literal["tokens", "static"]
RESERVE = 1.25  # requests per slot that a replica holds, so that its slots are filled within a turn


@dataclass(frozen=True, slots=True)
class Ended:
    """Rows whose responses a replica completed in a turn, and the tokens of these responses."""

    rows: Sequence[int]
    lengths: Sequence[int]


class RolloutScheduler:
    """Distributes the rows of one batch of prompts.

    prompt_lengths: tokens of each row's prompt. group_size: number of consecutive rows with the same prompt. slots: sequences
    that a replica runs at the same time (max_num_seqs). max_tokens: of a response, its expected length until one has ended.
    balance: "static" gives all groups away in the first turn, in rotation.
    """

    def __init__(
        self, prompt_lengths: Sequence[int], group_size: int, *, n_replicas: int, slots: int, max_tokens: int, balance: Balance
    ) -> None:
        self._prompt_lengths = prompt_lengths
        self._waiting = deque(range(start, start + group_size) for start in range(0, len(prompt_lengths), group_size))
        self._running: list[set[int]] = [set() for _ in range(n_replicas)]
        """By replica: the rows that it has."""
        self._prompt_tokens = [0.0] * n_replicas
        """By replica: the prompts of these rows, each counted once."""
        self._called: set[int] = set()
        self._group_size = group_size
        self._n_held = int(RESERVE * slots)
        self._mean_length = float(max_tokens)
        self._n_ended = self._ended_tokens = 0
        self._balance = balance

    @property
    def unfinished(self) -> int:
        """Number of rows that wait or run."""
        return len(self._waiting) * self._group_size + sum(map(len, self._running))

    def held(self, replica: int) -> int:
        """Number of rows that a replica has."""
        return len(self._running[replica])

    def turn(self, ended: Mapping[int, Ended]) -> dict[int, list[int]]:
        """Calls to start: by replica, the rows to be submitted (often none).

        ended: results of calls, by replica. A replica gets no call before the result of its last one.
        """
        for replica, results in ended.items():
            self._called.remove(replica)
            self._running[replica].difference_update(results.rows)
            self._prompt_tokens[replica] -= sum(self._prompt_lengths[row] for row in results.rows) / self._group_size
            self._n_ended += len(results.rows)
            self._ended_tokens += sum(results.lengths)
        if self._n_ended:
            self._mean_length = self._ended_tokens / self._n_ended
        new: list[list[int]] = [[] for _ in self._running]
        for replica in self._places():
            group = self._waiting.popleft()
            new[replica] += group
            self._running[replica].update(group)
            self._prompt_tokens[replica] += self._prompt_lengths[group[0]]
        calls = {replica: rows for replica, rows in enumerate(new) if self._running[replica] and replica not in self._called}
        self._called.update(calls)
        return calls

    def _places(self) -> Iterator[int]:
        """Replica for each group that is to be submitted now, in order."""
        if self._balance == "static":
            yield from (i % len(self._running) for i in range(len(self._waiting)))
            return
        while self._waiting:
            room = [
                i
                for i, rows in enumerate(self._running)
                if i not in self._called and (not rows or len(rows) + self._group_size <= self._n_held)
            ]
            if not room:
                return
            yield min(room, key=lambda i: (self._outstanding(i), i))

    def _outstanding(self, replica: int) -> float:
        """Expected tokens of a replica's rows. What a response has so far says nothing about its rest: each counts fully."""
        return self._prompt_tokens[replica] + self._mean_length * len(self._running[replica])
