"""trainer.main_ppo, and when each part of its start was over: what startup.py runs.

python -m scripts.bench.startup_parts FILE key=value ... writes {part: seconds since 1970} to FILE.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from trainer import main_ppo

ENDS = {"python and the program": time.time()}


def ended(part: str) -> None:
    """The first time counts."""
    ENDS.setdefault(part, time.time())


def then(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        ended(part)
        return result

    return called


def run(*args: Any) -> None:
    """In the place of main_ppo.run."""
    ended("config")
    from trainer.ppo import assemble
    from trainer.ppo.loop import Loop

    ended("imports")

    class Assembly(assemble.Assembly):
        def __init__(self, config: Any, place: Any, hosts: Any, life: Any, tokenizer: Any) -> None:
            super().__init__(config, place, hosts, life, tokenizer)
            ended("data")
            hosts["actor"].call("memory").result()  # they started meanwhile; the next call would wait for them
            ended("workers")

    parts = {
        "backend": (assemble, assemble.open_backend), "model": (Assembly, Assembly.actor), "engine": (Assembly, Assembly.rollout),
        "first sync": (Loop, Loop.sync_weights), "validation": (Loop, Loop.begin), "first step": (Loop, Loop.after),
    }  # fmt: skip
    for part, (owner, function) in parts.items():
        mock.patch.object(owner, function.__name__, then(function, part)).start()
    mock.patch.object(assemble, "Assembly", Assembly).start()
    main_ppo.run(*args)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    code = replace(main_ppo.PROGRAM, run=run)(sys.argv[2:])
    path.write_text(json.dumps(ENDS))
    sys.exit(code)
