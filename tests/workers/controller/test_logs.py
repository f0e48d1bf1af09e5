"""Destinations of output: a display, a file for libraries, and the user's terminal."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.controller.local_backend import stacks_after
from workers.controller.logs import chatter_to, heard_through, last_lines, tell

PROGRAM = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
early = logging.StreamHandler()
from workers.controller.logs import chatter_to, tell
with chatter_to(Path(sys.argv[1]) / "logs" / "controller.log"):
    print("printed"); tell("reported")
    print("noise: print", file=sys.stderr)
    os.write(1, b"noise: C out\\n"); os.write(2, b"noise: C err\\n")
    warnings.warn("noise: warning")
    early.emit(logging.makeLogRecord({"msg": "noise: early handler"}))
    logging.getLogger("x").error("noise: late handler")
    subprocess.run(["echo", "noise: child"])
    if sys.argv[2] == "fail":
        raise RuntimeError("the end")
print("after"); print("after too", file=sys.stderr); os.write(2, b"C again\\n")
"""


def run(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), how], capture_output=True, text=True)


def test_library_output_goes_to_the_file_and_the_programs_to_the_user(tmp_path: Path) -> None:
    done = run(tmp_path, "well")
    assert (done.stdout, done.stderr) == ("printed\nafter\n", "reported\nafter too\nC again\n")
    written = (tmp_path / "logs/controller.log").read_text()
    for way in ("print", "C out", "C err", "warning", "early handler", "late handler", "child"):
        assert f"noise: {way}" in written, way
    assert "printed" not in written and "reported" not in written
    assert last_lines(tmp_path / "logs/controller.log")[0].startswith("noise")


def test_error_goes_to_the_user(tmp_path: Path) -> None:
    done = run(tmp_path, "fail")
    assert done.returncode == 1 and done.stdout == "printed\n"
    assert done.stderr.startswith("reported\nTraceback") and done.stderr.endswith("RuntimeError: the end\n")


def test_second_attempt_appends_to_the_file(tmp_path: Path) -> None:
    for word in ("one", "two"):
        with chatter_to(tmp_path / "logs" / "controller.log"):
            os.write(2, f"{word}\n".encode())
    assert [line for line in (tmp_path / "logs/controller.log").read_text().splitlines() if "---" not in line] == ["one", "two"]


def test_replaced_stderr_still_receives_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chatter_to(tmp_path / "logs" / "controller.log"):
        print("printed")
        tell("reported")
        print("noise", file=sys.stderr)
    assert capsys.readouterr() == ("printed\n", "reported\nnoise\n")


def test_open_display_receives_printed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with heard_through(shown):
        tell("one")
    tell("two")
    assert shown.getvalue() == "one\n" and capsys.readouterr().err == "two\n"


def test_stacks_of_a_late_call_go_to_the_user(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with chatter_to(tmp_path / "logs" / "controller.log"), stacks_after(0.05):
        subprocess.run(["sleep", "0.3"])
    assert "Timeout (0:00:00" in capfd.readouterr().err
    assert "Timeout" not in (tmp_path / "logs/controller.log").read_text()


def test_nccl_cause_precedes_the_last_lines(tmp_path: Path) -> None:
    cause = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    frames = [f"frame #{number}: c10d" for number in range(100)]
    (tmp_path / "log").write_text("\n".join(["--- process 7", "early", cause, *frames]))
    assert last_lines(tmp_path / "log") == (cause, *frames[-30:])
    (tmp_path / "log").write_text("\n".join(["--- process 7", *frames[:10], cause]))
    assert last_lines(tmp_path / "log") == (*frames[:10], cause)
