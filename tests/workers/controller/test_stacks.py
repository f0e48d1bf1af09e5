"""Stacks of a process, requested from outside."""

import os
import threading
from pathlib import Path

from workers.controller.stacks import Frame, enable_stack_reports, frames_by_thread, memory_of_stacks, own_stacks

TWO_THREADS = """\
Thread 0x00007efe32a6c6c0 (most recent call first):
  File "/lib/threading.py", line 982 in run
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007efe33625b80 (most recent call first):
  File "/tmp/a b.py", line 6 in hang
  File "/tmp/a b.py", line 7 in <module>
"""


def test_frames_of_each_thread_start_with_the_innermost() -> None:
    other, main = frames_by_thread(TWO_THREADS)
    assert other[0] == Frame("/lib/threading.py", 982, "run")
    assert main == [Frame("/tmp/a b.py", 6, "hang"), Frame("/tmp/a b.py", 7, "<module>")]
    assert frames_by_thread("") == []


def test_process_announces_once_that_it_replies() -> None:
    for _ in range(2):
        enable_stack_reports()
    memory = memory_of_stacks(os.getpid())
    assert memory is not None
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
    assert links.count(os.readlink(memory)) == 1
    assert memory_of_stacks(1) is None, "a process of another user"
    assert memory_of_stacks(2**22 + 1) is None, "no process"


def test_own_stacks_are_read_while_other_threads_run() -> None:
    """faulthandler's signal handler and timer thread crash here now and then: frames change while they are read."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            sum(i for i in range(50))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            found = frames_by_thread(own_stacks())
            assert sum(any(frame.function == "run" and frame.file == __file__ for frame in frames) for frames in found) == 4
    finally:
        stop.set()
        for thread in threads:
            thread.join()
