"""Slow tools on a real engine: all conversations are complete in every mode."""

import json

import pytest

from scripts.bench.slow_tools import main


@pytest.mark.soak
def test_quick_run_completes_the_same_conversations_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert modes["one turn"]["utilisation"] == 1 and modes["one turn"]["waited"] == 0
    conversations = [mode for name, mode in modes.items() if name != "one turn"]
    assert len({mode["tokens"] for mode in conversations}) == 1, "seeds do not depend on the clock"
    assert all(0 < mode["running"] <= 4 and mode["utilisation"] > 0 for mode in conversations)
    assert modes["slow, logical"]["waited"] > modes["no delay, logical"]["waited"]
