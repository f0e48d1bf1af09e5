"""Map a function over the rows of a data set in several processes; results and the first error are those of one process.

The children are fresh interpreters, started by module name. multiprocessing with spawn would execute a user's script again in
each child if it has no ``if __name__ == "__main__"``; a fork would inherit locks held by threads of torch and of the tokenizer,
which exist in the child without the threads that would release them.
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

from workers.controller.environment import import_path
from workers.controller.logs import tell

PART = 1024
"""Rows per task."""
MANY = 32 * PART
"""Rows from which child processes pay off: starting one takes a second or two."""
MOST = 16
"""Maximum number of processes."""
NEWS_SECONDS = 10.0
"""Interval of progress lines in seconds."""

Row = TypeVar("Row")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Sequence[Row]], list[Result]], rows: Sequence[Row], what: str, workers: int | None = None
) -> list[Result]:
    """Apply ``work`` to all rows in chunks; one result per row, in order.

    what: description for progress lines. workers: number of processes; None: one per core if there are many rows. ``work`` is
    pickled; if it cannot be pickled, everything runs in this process.
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
            # One thread per child, blocked on its pipe. map() yields results and raises errors in the order of the chunks, so
            # the error that the user sees does not depend on which child was fastest.
            found = stack.enter_context(ThreadPoolExecutor(workers)).map(lambda part: _run_on_idle(idle, part), parts)
        results: list[Result] = []
        reported = time.monotonic()
        for part in found:
            results += part
            if time.monotonic() - reported > NEWS_SECONDS and len(results) < len(rows):
                reported = time.monotonic()
                tell(f"{what}: {len(results):,} of {len(rows):,} rows, in {workers if pickled is not None else 1} processes")
    return results


def _pickled(work: Callable[..., Any]) -> bytes | None:
    """``work`` as bytes; None if it cannot be pickled."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, TypeError, AttributeError):  # a tokenizer in pure Python may hold any object
        return None


def _run_on_idle(idle: SimpleQueue[Child], part: Sequence[Any]) -> Any:
    """Process ``part`` on the next idle child."""
    child = idle.get()
    try:
        return child(part)
    finally:
        idle.put(child)


class Child:
    """A child process that applies the pickled ``work`` to one chunk after the other.

    It exits at the end of its standard input, hence also when this process dies.
    """

    def __init__(self, work: bytes) -> None:
        self._process = subprocess.Popen(
            # -P: no file of the working directory is imported in place of a module.
            [sys.executable, "-P", "-m", "trainer.data.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # By default there is a process per core: threads of the tokenizer would compete with the other processes.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path()), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C in the terminal goes to the controller only
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
        # All results have arrived, or an error has made them useless.
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Entry point of a child: read pickled chunks from standard input, write pickled results to standard output."""
    # Libraries may print to standard output, which would corrupt the stream of results: results get a copy of the descriptor,
    # and descriptor 1 is redirected to standard error.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work = pickle.load(sys.stdin.buffer)
    while True:
        try:
            part = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = work(part)
        except Exception as error:  # raised again by the parent, see Child.__call__
            result = error
        pickle.dump(result, results, pickle.HIGHEST_PROTOCOL)
        results.flush()


if __name__ == "__main__":
    main()
