from collections.abc import Iterator
from pathlib import Path

from trainer.resilience.failed_tools import FailedTools
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines


def step(**of_tool: tuple[float, float]) -> dict[str, float]:
    """Metrics of a step. of_tool: (calls, errors)."""
    pairs = ((tool, dict(zip(("calls", "errors", "seconds"), (*counts, 1.0), strict=True))) for tool, counts in of_tool.items())
    return {f"agents/tool/{tool}/{name}": value for tool, values in pairs for name, value in values.items()} | {
        "agents/turns": 2.0
    }


def test_tool_that_fails_in_every_call_is_reported_once_and_again_after_a_success(tmp_path: Path) -> None:
    tools = FailedTools(Events(tmp_path))

    def reported(*steps: dict[str, float]) -> Iterator[int]:
        for number, metrics in enumerate(steps, 1):
            tools.look(number, metrics)
        yield from (
            event["step"] for event in read_lines(tmp_path / EVENTS) if "every call of search has failed" in event["text"]
        )

    bad, partly, none = (
        step(search=(0.5, 0.5), calc=(2.0, 1.0)),
        step(search=(0.5, 0.4)),
        step(search=(0.0, 0.0), calc=(1.0, 0.0)),
    )
    assert [*reported(bad, none, bad, bad, {}, bad, partly, bad, bad, bad)] == [3, 9], "a step without a call keeps the count"
    assert all("calc" not in event["text"] for event in read_lines(tmp_path / EVENTS))
