from pathlib import Path

import pytest

from tests.full_disk import small_files
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines


def test_event_is_a_line_in_the_file_and_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path / "run")
    events.add(3, "alarm", "KL of 7\nis above 2")
    events.add(4, "restart", "rank 1 died")
    output = [(event["step"], event["kind"], event["text"]) for event in read_lines(tmp_path / "run" / EVENTS)]
    assert output == [(3, "alarm", "KL of 7 is above 2"), (4, "restart", "rank 1 died")]
    assert capsys.readouterr().err == "alarm: step 3: KL of 7 is above 2\nrestart: step 4: rank 1 died\n"


def test_an_event_after_a_full_disk_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path)
    events.add(1, "alarm", "first")
    with small_files(events.path.stat().st_size + 40):
        events.add(2, "failed save", "no room")
    events.add(3, "alarm", "room again")
    assert [event["step"] for event in read_lines(events.path)] == [1, 3]
    assert "bytes were not written" in capsys.readouterr().err


def test_event_contains_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_TOKEN", "s3cret-s3cret")
    Events(tmp_path).add(1, "copy", "http://me:pw@host/x refused s3cret-s3cret")
    assert read_lines(tmp_path / EVENTS)[0]["text"] == "http://***@host/x refused ***"
    assert capsys.readouterr().err == "copy: step 1: http://***@host/x refused ***\n"
