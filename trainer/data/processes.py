"""Work on the rows of a data set in several processes. The results, and which error comes first, are those of one process.

The processes are interpreters of their own that are started by name. multiprocessing would run a user's script again in each of
them where it has no ``if __name__ == "__main__"``; a fork would inherit the locks of torch's and the tokenizer's threads.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from workers.controller.logs import tell
from workers.controller.session import import_path

PART = 1024  # rows that are worked on at a time
MANY = 32 * PART  # rows from which on other processes are worth their start, of a second or two
MOST = 16  # processes
NEWS_SECONDS = 10.0

Row = TypeVar("Row")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Sequence[Row]], list[Result]], rows: Sequence[Row], what: str, workers: int | None = None
) -> list[Result]:
    """``work`` of all rows, in parts; a result for each row, in order. what: for a line about long work.

    workers: processes; None: one for each core, if there are many rows. ``work`` is pickled; what cannot be works here.
    """
    parts = [rows[start : start + PART] for start in range(0, len(rows), PART)]
    if workers is None:
        workers = 1 if len(rows) < MANY else min(MOST, len(os.sched_getaffinity(0)))
    workers = min(workers, len(parts))
    pickled = _pickled(work) if workers > 1 else None
    with ExitStack() as stack:
        found: Iterator[list[Result]] = map(work, parts)
        if pickled is not None:
            idle: SimpleQueue[Child] = SimpleQueue()
            for child in [stack.enter_context(Child(pickled)) for _ in range(workers)]:
                idle.put(child)
            found = stack.enter_context(ThreadPoolExecutor(workers)).map(lambda part: _next(idle, part), parts)
        results: list[Result] = []
        told = time.monotonic()
        for part in found:
            results += part
            if time.monotonic() - told > NEWS_SECONDS and len(results) < len(rows):
                told = time.monotonic()
                tell(f"{what}: {len(results):,} of {len(rows):,} rows, in {workers if pickled is not None else 1} processes")
    return results


def _pickled(work: Callable[..., Any]) -> bytes | None:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, TypeError, AttributeError):  # a tokenizer of plain Python may hold anything
        return None


def _next(idle: SimpleQueue[Child], part: Sequence[Any]) -> Any:
    child = idle.get()
    try:
        return child(part)
    finally:
        idle.put(child)


class Child:
    """A process that does ``work``, pickled, of one part after the other. It ends with its standard input, and so with us."""

    def __init__(self, work: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.data.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path()), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # a terminal's Ctrl-C is for the controller
        )
        self._work: bytes | None = work

    def __call__(self, part: Sequence[Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if self._work is not None:
                self._process.stdin.write(self._work)
                self._work = None
            pickle.dump(part, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"a process that tokenises ended with exit code {self._process.wait()}") from error
        if isinstance(result, Exception):
            raise result
        return result

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    work = pickle.load(sys.stdin.buffer)
    while True:
        try:
            part = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = work(part)
        except Exception as error:
            result = error
        pickle.dump(result, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
