"""Start-up timing of vLLM's worker: device, model, profiling and graph capture, recorded in ``START``."""

from __future__ import annotations

from typing import Any

from workers.start_times import START


class TimedStart:
    """Mixin that times the start-up methods of a vLLM worker. List it before the worker among the base classes."""

    def init_device(self) -> Any:
        with START("device"):
            return super().init_device()  # type: ignore[misc] # method of the vLLM worker, the next base

    def load_model(self, **kwargs: Any) -> Any:
        with START("model"):
            return super().load_model(**kwargs)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        """Profile the longest batch. The model is compiled for this pass, so compilation is part of this time."""
        with START("compile and profile"):
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        with START("capture"):
            return super().compile_or_warm_up_model()  # type: ignore[misc]
