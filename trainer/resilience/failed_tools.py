"""Report tools whose calls all fail: a server has ended, or the model gives wrong arguments.

Training continues then, because an error is a result for the model, and rewards may not show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.run.events import Events

PATIENCE = 2
"""Steps in a row in which every call of a tool fails before it is reported; a step without a call keeps the count."""


class FailedTools:
    """Records an event for a tool when all of its calls have failed for PATIENCE steps, and again after one has succeeded."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._steps: dict[str, int] = {}

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """metrics: of the step, with the means per session agents/tool/<name>/calls and errors."""
        for name, calls in metrics.items():
            if not calls or not (tool := re.fullmatch("agents/tool/(.+)/calls", name)):
                continue
            fails = metrics[f"agents/tool/{tool[1]}/errors"] >= calls
            self._steps[tool[1]] = self._steps.get(tool[1], 0) + 1 if fails else 0
            if self._steps[tool[1]] == PATIENCE:
                where = "see the replies in the conversations of report.html"
                text = f"every call of {tool[1]} has failed for {PATIENCE} steps: {where}"
                self._events.add(step, "tool", text)
