"""Score responses in a pool of processes with a time limit per response; a failure affects only its own response.

Problem: reward functions are user code that runs on hostile text. They hang, exhaust memory or crash the interpreter, and a hang
inside C code cannot be interrupted from Python. Idea: plain subprocesses that report every score as soon as it is known, so that
the pool knows which response is in progress when a deadline passes; it kills the process with everything it started, fails that
response, returns the rest of the chunk to the queue and starts a new process. Executors of the standard library know neither
deadlines per item nor replacement of a dead worker.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from math import inf
from types import TracebackType

import psutil

from configs.schema.ppo import ScoringConfig, asks_rules
from trainer.rewards.pool.worker import check_file, resolve
from trainer.rewards.rules.reward_registry import check_data_sources, may_ask_judge, scores_by_source, with_own_function
from trainer.rewards.sandbox.forkserver import close_fork_servers
from trainer.rewards.scoring import Response, Score, ScoreFunction, ScoringProgress, score_all
from workers.controller.stop import kill_group

_START_LIMIT = 120.0
"""Seconds until a process must be ready: the user's module may import a lot."""
_CHUNKS_PER_PROCESS = 4
"""A process gets this part of its share of the waiting responses at a time: slow responses balance out between processes."""
_MAX_CHUNK = 64
_PIECE_SECONDS = 5.0
"""Seconds until the next piece of a message that has arrived in part is due."""
_CHILD = "import sys; sys.path[:] = {path!r}; from trainer.rewards.pool.worker import main; main({fd}, {parent})"


class RewardRunner:
    """Pool of ``reward.num_workers`` processes, at most one per core; 0: score in this process, without a time limit.

    A user's function over whole batches gets one process, and its time limit is that of a response times their number.
    Processes are plain interpreters without torch that die with the thread that started them. Not thread-safe.
    """

    def __init__(self, config: ScoringConfig) -> None:
        """Start nothing yet. Raises ValueError if the user's file does not exist or the scorer is unknown."""
        config = with_own_function(config)
        custom = config.custom_reward_function
        if custom.path is not None:
            config = replace(config, custom_reward_function=replace(custom, path=check_file(custom.path)))
        self._config = config
        self._size = min(config.num_workers, len(os.sched_getaffinity(0))) if asks_rules(config) else 0
        self._threads = -(-config.judge.concurrency // max(1, self._size)) if may_ask_judge(config) else 1
        self._timeout = config.timeout
        self._function: ScoreFunction | None = None
        # Whether the function takes whole batches; None until the first process reports it, as only processes load the file.
        self._whole: bool | None = None
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._answers: dict[int, Response] = {}
        self._waiting: deque[int] = deque()
        """Keys of responses that no process has."""
        self._scores: dict[int, Score] = {}
        self.progress = ScoringProgress()

    def start(self) -> None:
        """Start the processes without waiting for them to become ready."""
        if self._size == 0 and self._function is None:
            self._function = resolve(self._config)
        while len(self._processes) < self._size:
            self._add()

    def wait_ready(self) -> None:
        """Wait for all processes. Raises ValueError if the user's function fails to load, RuntimeError if one dies."""
        self.start()
        try:
            while not all(process.ready for process in self._processes):
                self._turn(wait=True)
        except BaseException:
            self.close()
            raise

    def submit(self, answers: Sequence[Response], keys: Sequence[int]) -> None:
        """Queue responses and give them to idle processes, without waiting. keys: see Rewards.

        Raises ValueError for a data source without a scorer, and as wait_ready does.
        """
        self._queue(answers, keys)
        if self._function is None:
            with self._closed_on_error():
                self._turn(wait=False)
                # One chunk for each idle process: the next call may be a while away.
                if self._whole is False:
                    self._give(1, ())

    def finish(self, keys: Sequence[int]) -> list[Score]:
        """Wait for the scores of submitted responses; returns them in the order of ``keys``. Raises as submit does."""
        with self._closed_on_error():
            if self._function is not None:
                scores = score_all(self._function, [self._answers[key] for key in keys], self._threads)
                for key, score in zip(keys, scores, strict=True):
                    self._add_scores({key: score})
                taken = set(keys)
                self._waiting = deque(key for key in self._waiting if key not in taken)
            missing = set(keys) - self._scores.keys()
            while missing:
                self._give(_CHUNKS_PER_PROCESS, keys)
                missing -= self._turn(wait=True).keys()
        found = [self._scores.pop(key) for key in keys]
        for key in keys:
            del self._answers[key]
        return found

    def score(self, answers: Sequence[Response]) -> list[Score]:
        """One score per response, in order. Raises as submit does."""
        self._queue(answers, range(len(answers)))
        return self.finish(range(len(answers)))

    def _queue(self, answers: Sequence[Response], keys: Sequence[int]) -> None:
        if scores_by_source(self._config):
            check_data_sources(answer.data_source for answer in answers)
        self.start()
        if not self._answers:
            self.progress = ScoringProgress()
        self.progress.asked += len(answers)
        self._waiting += keys
        self._answers |= zip(keys, answers, strict=True)

    def _give(self, parts: int, batch: Sequence[int]) -> None:
        """Give each idle process one of ``parts`` chunks of its share of the waiting responses.

        batch: what a function over whole batches gets.
        """
        if self._whole is None:
            return
        for process in self._processes:
            if self._waiting and process.idle:
                # A function over whole batches gets the responses in order, and nothing of a later batch.
                whole = (key for key in batch if key not in self._scores)
                chunk = list(whole if self._whole else islice(self._waiting, self._chunk_size(parts)))
                if process.give(chunk, self._answers, self._limit(chunk)):
                    given = set(chunk)
                    self._waiting = deque(key for key in self._waiting if key not in given)

    def _chunk_size(self, parts: int) -> int:
        if self._threads > 1:  # requests to a judge overlap within a chunk, so chunks must be larger than the number of threads
            parts, longest = 1, _CHUNKS_PER_PROCESS * self._threads
        else:
            longest = _MAX_CHUNK
        return min(longest, -(-len(self._waiting) // (self._size * parts)))

    def _add_scores(self, scores: dict[int, Score]) -> None:
        self._scores |= scores
        self.progress.add(scores.values())

    def _forget(self) -> None:
        self._answers, self._scores = {}, {}
        self._waiting.clear()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the runner on an error: scores in flight would be taken for those of the next call."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes and everything they started. The runner restarts them when it is used again."""
        for process in self._processes:
            self._selector.unregister(process.connection)
            process.kill()
        self._processes.clear()
        self._forget()
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

    def _turn(self, *, wait: bool) -> dict[int, Score]:
        """Add the scores that have arrived, and those of processes that died or exceeded their deadline; wait: for the first.

        Returns them by key.
        """
        scores: dict[int, Score] = {}
        first = min(process.deadline for process in self._processes) if wait else 0.0
        for key, _ in self._selector.select(None if first == inf else max(0.0, first - time.monotonic())):
            process: _Process = key.data
            if process not in self._processes:
                continue  # replaced or dropped earlier in this loop
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
        # A copy: _replace() changes the list.
        for process in list(self._processes):
            if time.monotonic() >= process.deadline:
                scores |= self._replace(process, f"timed out after {self._limit(process.given):g} s")
        self._add_scores(scores)
        return scores

    def _limit(self, given: Sized) -> float:
        """Seconds until the next message of a process with these responses is due."""
        return self._timeout * len(given) if self._whole else self._timeout

    def _keep(self, process: _Process) -> None:
        """Keep only this process: a function over whole batches needs one, and the user's module may use much memory."""
        self._size = 1
        for other in self._processes:
            if other is not process:
                self._selector.unregister(other.connection)
                other.kill()
        self._processes = [process]

    def _replace(self, process: _Process, reason: str | None = None) -> dict[int, Score]:
        """Replace a dead or late process; return failed scores for what it was working on, requeue the rest of its chunk."""
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
        # Scores come in order, so without batches the first outstanding response is the one that failed.
        failed = len(given) if self._whole else 1
        self._waiting.extendleft(reversed(given[failed:]))
        score = Score(None, {}, reason or f"the scoring process {ending}", timed_out=reason is not None)
        return dict.fromkeys(given[:failed], score)


class _Process:
    """One scoring process. given: keys of responses without a score yet. deadline: time by which its next message is due."""

    def __init__(self, config: ScoringConfig, threads: int) -> None:
        self.connection, child_end = socket.socketpair()
        command = _CHILD.format(path=sys.path, fd=child_end.fileno(), parent=os.getpid())
        # A session of its own: kill() then reaches everything that a reward function started.
        self._popen = subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()], start_new_session=True
        )
        child_end.close()
        self.connection.settimeout(_START_LIMIT)  # sendall must not block forever on a process that was stopped (SIGSTOP)
        self._rest = b""
        self.ready = False
        self.ended = False
        self.given: deque[int] = deque()
        self.deadline = time.monotonic() + _START_LIMIT
        self.connection.sendall(pickle.dumps((config, threads)))

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    def give(self, chunk: list[int], answers: Mapping[int, Response], timeout: float) -> bool:
        """Send a chunk; False if the process has died since its last message, which the next ``read`` reports."""
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
        """Messages that have arrived completely; sets ``ended`` at the end of the stream."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:  # it died with unread responses in its buffer
            data = b""
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest:
            # It has finished in time, and waited for the runner: a large message does not fit into the socket.
            self.deadline = max(self.deadline, time.monotonic() + _PIECE_SECONDS)
        return json.loads(b"[" + b",".join(lines) + b"]")

    def wait_for_exit(self) -> None:
        """Wait up to a second for the exit code of a process whose socket has closed."""
        # WNOWAIT does not reap the process: its id must stay valid until kill() has signalled its process group.
        deadline = time.monotonic() + 1.0
        while os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def kill(self) -> str:
        """Kill the process and everything it started; return how it ended.

        What runs in another session is found below the process alone: not after it, or what started it there, has ended.
        """
        self.connection.close()
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self._popen.pid).children(recursive=True)
        ending = kill_group(self._popen)
        # Those in sessions of their own: Popen(start_new_session=True) is common in code that runs programs.
        for process in started:
            with suppress(psutil.Error):
                process.kill()
        return ending
