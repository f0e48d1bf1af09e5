from pathlib import Path

import pytest

from trainer.events import Events
from trainer.run_dir import EVENTS, read_lines


def test_an_event_is_a_line_in_the_file_and_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path / "run")
    events.add(3, "alarm", "KL of 7\nis above 2")
    events.add(4, "restart", "rank 1 died")
    told = [(event["step"], event["kind"], event["text"]) for event in read_lines(tmp_path / "run" / EVENTS)]
    assert told == [(3, "alarm", "KL of 7 is above 2"), (4, "restart", "rank 1 died")]
    assert capsys.readouterr().err == "alarm: step 3: KL of 7 is above 2\nrestart: step 4: rank 1 died\n"
