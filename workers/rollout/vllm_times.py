"""What vLLM's worker takes for the parts of its start, under the names of StartTimes."""

from __future__ import annotations

from typing import Any

from workers.start_times import START


class TimedStart:
    """Stands before a worker of vLLM's among the bases of a class."""

    def init_device(self) -> Any:
        with START("device"):
            return super().init_device()  # type: ignore[misc] # the worker's

    def load_model(self, **kwargs: Any) -> Any:
        with START("model"):
            return super().load_model(**kwargs)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        """A pass over the longest batch, for which the model is compiled."""
        with START("compile and profile"):
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        with START("capture"):
            return super().compile_or_warm_up_model()  # type: ignore[misc]
