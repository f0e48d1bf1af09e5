"""Scores answers in a pool of processes, each answer under a time limit. A bad answer costs itself alone."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from math import inf
from types import TracebackType

from configs.rules import asks_rules
from configs.schema.ppo import ScoringConfig
from trainer.rewards.custom import check_file
from trainer.rewards.forkserver import close_fork_servers
from trainer.rewards.registry import check_data_sources, may_ask_judge, scores_by_source, with_own_function
from trainer.rewards.scoring import Answer, Progress, Score, ScoreFunction, judge_all
from trainer.rewards.worker import resolve

_START_LIMIT = 120.0  # seconds until a process must be ready: the user's module may import a lot
_CHUNKS_PER_PROCESS = 4  # enough that slow answers even out between processes
_MAX_CHUNK = 64
_CHILD = "import sys; sys.path[:] = {path!r}; from trainer.rewards.worker import main; main({fd}, {parent})"


class RewardRunner:
    """``reward.num_workers`` processes, at most one a core; 0: scores in this process, without a time limit. One process, if the
    user's function takes whole batches; the limit of a batch is that of an answer times their number.

    Processes are plain interpreters that load no torch, and die with the thread that started them. Two threads must not use a
    runner at once.
    """

    def __init__(self, config: ScoringConfig) -> None:
        """Raises ValueError if the user's file is not there, or a scorer not known. Starts nothing."""
        config = with_own_function(config)
        custom = config.custom_reward_function
        if custom.path is not None:
            config = replace(config, custom_reward_function=replace(custom, path=check_file(custom.path)))
        self._config = config
        self._size = min(config.num_workers, len(os.sched_getaffinity(0))) if asks_rules(config) else 0
        self._threads = -(-config.judge.concurrency // max(1, self._size)) if may_ask_judge(config) else 1
        self._timeout = config.timeout
        self._function: ScoreFunction | None = None
        self._whole: bool | None = None  # whether it takes whole batches; None: the first process that is ready will say
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._chunks: deque[list[int]] = deque()
        self.progress = Progress()

    def start(self) -> None:
        """Start the processes and return at once; they get ready meanwhile."""
        if self._size == 0 and self._function is None:
            self._function = resolve(self._config)
        while len(self._processes) < self._size:
            self._add()

    def wait_ready(self) -> None:
        """Until every process can score. Raises ValueError if the user's function does not load, RuntimeError if one fails."""
        self.start()
        try:
            while not all(process.ready for process in self._processes):
                self._turn()
        except BaseException:
            self.close()
            raise

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score an answer, in order. Raises ValueError for a data source without scorer, and as wait_ready does."""
        if scores_by_source(self._config):
            check_data_sources(answer.data_source for answer in answers)
        self.start()
        self.progress = Progress(len(answers))
        if self._function is not None:
            found = []
            for score in judge_all(self._function, answers, self._threads):
                found.append(score)
                self.progress.add([score])
            return found
        scores: dict[int, Score] = {}
        try:
            while self._whole is None:
                self._turn()
            if self._whole:
                self._chunks = deque(_cut(len(answers), 1, len(answers)))
            elif self._threads == 1:
                self._chunks = deque(_cut(len(answers), self._size * _CHUNKS_PER_PROCESS, _MAX_CHUNK))
            else:  # those that wait for a judge wait together
                self._chunks = deque(_cut(len(answers), self._size, _CHUNKS_PER_PROCESS * self._threads))
            while len(scores) < len(answers):
                for process in self._processes:
                    if self._chunks and process.idle and process.give(self._chunks[0], answers, self._limit(self._chunks[0])):
                        self._chunks.popleft()
                news = self._turn()
                self.progress.add(news.values())
                scores |= news
        except BaseException:
            self.close()  # answers in flight would be taken for those of the next call
            raise
        return [scores[i] for i in range(len(answers))]

    def close(self) -> None:
        """Kill the processes, and whatever they have started. The runner starts anew when it is next used."""
        for process in self._processes:
            self._selector.unregister(process.connection)
            process.kill()
        self._processes.clear()
        if self._function is not None:
            close_fork_servers()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _add(self) -> None:
        process = _Process(self._config, self._threads)
        self._processes.append(process)
        self._selector.register(process.connection, selectors.EVENT_READ, process)

    def _turn(self) -> dict[int, Score]:
        """Wait until a process says something, ends or is late; the scores that came of it."""
        scores: dict[int, Score] = {}
        first = min(process.deadline for process in self._processes)
        for key, _ in self._selector.select(None if first == inf else max(0.0, first - time.monotonic())):
            process: _Process = key.data
            if process not in self._processes:
                continue  # dismissed a moment ago
            for message in process.read():
                if process.ready:
                    scores[process.given.popleft()] = Score(*message)
                elif isinstance(message, str):
                    raise ValueError(message)
                else:
                    process.ready, self._whole = True, message
                    if self._whole:
                        self._keep(process)
                process.wait_for_next(self._timeout)
            if process.ended:
                scores |= self._replace(process)
        for process in list(self._processes):
            if time.monotonic() >= process.deadline:
                scores |= self._replace(process, f"timed out after {self._limit(process.given):g} s")
        return scores

    def _limit(self, given: Sized) -> float:
        """Seconds until the next word about what a process was given is due."""
        return self._timeout * len(given) if self._whole else self._timeout

    def _keep(self, process: _Process) -> None:
        """And no other: the user's module may hold much."""
        self._size = 1
        for other in self._processes:
            if other is not process:
                self._selector.unregister(other.connection)
                other.kill()
        self._processes = [process]

    def _replace(self, process: _Process, reason: str | None = None) -> dict[int, Score]:
        """A new process for one that is dead or late. It fails what it had in hand; the rest of its chunk goes back."""
        self._selector.unregister(process.connection)
        self._processes.remove(process)
        if process.ended:
            process.wait_for_exit()
        ending = process.kill()
        if not process.ready:
            how = ending if process.ended else f"was not ready in {_START_LIMIT:g} s"
            raise RuntimeError(f"a scoring process did not start: it {how}")
        self._add()
        given = list(process.given)
        in_hand = len(given) if self._whole else 1
        if given[in_hand:]:
            self._chunks.appendleft(given[in_hand:])
        score = Score(None, {}, reason or f"the scoring process {ending}", timed_out=reason is not None)
        return dict.fromkeys(given[:in_hand], score)


class _Process:
    """given: the answers it has not scored yet, the first or all in hand. deadline: when the next word from it is due."""

    def __init__(self, config: ScoringConfig, threads: int) -> None:
        self.connection, theirs = socket.socketpair()
        command = _CHILD.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
        self._popen = subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self.connection.settimeout(_START_LIMIT)  # no call waits for ever, not even for a process that is stopped
        self._rest = b""
        self.ready = False
        self.ended = False
        self.given: deque[int] = deque()
        self.deadline = time.monotonic() + _START_LIMIT
        self.connection.sendall(pickle.dumps((config, threads)))

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    def give(self, chunk: list[int], answers: Sequence[Answer], timeout: float) -> bool:
        """False if it has died since its last answer: the end of its stream is there to be read."""
        try:
            self.connection.sendall(pickle.dumps([answers[i] for i in chunk]))
        except (BrokenPipeError, ConnectionResetError):
            return False
        self.given.extend(chunk)
        self.wait_for_next(timeout)
        return True

    def wait_for_next(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout if self.given else inf

    def read(self) -> list:
        """The messages that have arrived whole. Notes when it has ended."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:  # it died with answers unread
            data = b""
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return json.loads(b"[" + b",".join(lines) + b"]")

    def wait_for_exit(self) -> None:
        """Its socket has closed: a moment for its exit code. It is not reaped here, so that its id stays its own."""
        patience = time.monotonic() + 1.0
        while os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < patience:
            time.sleep(0.001)

    def kill(self) -> str:
        """End it and what it has started; how it ended."""
        self.connection.close()
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._popen.pid, signal.SIGKILL)  # it leads a session of its own
        code = self._popen.wait()
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _cut(n: int, parts: int, longest: int) -> list[list[int]]:
    """0 .. n - 1 in runs: about ``parts`` of them, none longer than ``longest``."""
    size = min(longest, -(-n // parts))
    return [list(range(start, min(start + size, n))) for start in range(0, n, size)] if n else []
