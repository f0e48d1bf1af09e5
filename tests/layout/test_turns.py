"""Exclusive and shared turns of several test processes (tests/turns.py)."""

import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tests.layout.source import ROOT
from tests.turns import made_once, turn

TESTS = """
import json, time
from pathlib import Path
import pytest

@pytest.fixture
def noted(request):
    begun = time.monotonic()
    yield
    with Path("{notes}").open("a") as file:
        file.write(json.dumps([request.node.name, begun, time.monotonic()]) + "\\n")

@pytest.mark.parametrize("i", range(3))
def test_before(i, noted):
    time.sleep(0.2)

@pytest.mark.alone
def test_alone(noted):
    time.sleep(0.2)

def test_after(noted):
    time.sleep(0.2)
"""


def test_no_other_test_runs_during_one_marked_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS.format(notes=notes))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    options = ["-p", "tests.turns", "-n", "2", "--dist", "loadfile", "--rootdir", tmp_path]
    run = subprocess.run([sys.executable, "-m", "pytest", *options, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    times = [json.loads(line) for line in notes.read_text().splitlines()]
    concurrent: dict[str, list[int]] = {}
    for name, begun, end in times:
        others = sum(begun < other_end and other_begun < end for _, other_begun, other_end in times) - 1
        concurrent.setdefault(name, []).append(others)
    assert len(times) == 10 and concurrent.pop("test_alone") == [0, 0] and any(map(any, concurrent.values()))


def test_a_waiting_exclusive_turn_precedes_later_shared_ones(tmp_path: Path) -> None:
    came, leave = [], {name: Event() for name in ("first", "second", "alone", "later")}

    def go(name: str) -> None:
        with turn(tmp_path, alone=name == "alone"):
            came.append(name)
            assert leave[name].wait(60)

    with ThreadPoolExecutor() as pool:

        def start(name: str) -> Future[None]:
            future = pool.submit(go, name)
            time.sleep(0.2)
            return future

        ended = [start(name) for name in ("first", "second", "alone", "later")]
        assert came == ["first", "second"]
        for name in ("first", "second"):
            leave[name].set()
        time.sleep(0.2)
        assert came == ["first", "second", "alone"]
        for name in ("alone", "later"):
            leave[name].set()
        for future in ended:
            future.result()
    assert came == ["first", "second", "alone", "later"]


def test_a_forked_process_does_not_keep_the_turn(tmp_path: Path) -> None:
    with turn(tmp_path, alone=True):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    with turn(tmp_path, alone=True):
        assert child.is_alive()
    child.kill()
    child.join()


def test_made_once_returns_the_complete_result_to_all(tmp_path: Path) -> None:
    makers = []

    def make(path: Path) -> None:
        makers.append(path)
        time.sleep(0.2)
        (path / "whole").touch()

    def ask(_: int) -> bool:
        return (made_once(tmp_path / "dear", make) / "whole").exists()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, range(3))) == [True] * 3
    assert makers == [tmp_path / "dear"]
