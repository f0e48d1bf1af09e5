"""What runs in SGLang's own processes, one for each of its ranks."""

from __future__ import annotations

from typing import Any


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's process of one rank; but only what a request says ends an answer, not the model's directory."""
    from sglang.srt.managers import scheduler

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_config.hf_eos_token_id = set()

    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(*args, **kwargs)
