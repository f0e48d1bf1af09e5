"""What runs on the controller. Loads neither ray, hydra nor torch, before run_ppo is asked for."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.run.version import __version__

if TYPE_CHECKING:
    from trainer.cli.api import Callback, RunResult, run_ppo

__all__ = ["Callback", "RunResult", "__version__", "run_ppo"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.cli import api

    return vars(api)[name]


def _check_not_shadowed() -> None:
    """`workers` and `configs` are common names: a directory of the user's that comes first on sys.path hides this package's."""
    home = Path(__file__).resolve().parent.parent
    for name in ("workers", "configs"):
        spec = find_spec(name)
        found = [Path(path).resolve() for path in (spec and spec.submodule_search_locations) or ()]
        if home / name not in found[:1]:
            other = found[0] if found else (spec and spec.origin) or "nothing"
            raise ImportError(
                f"`import {name}` finds {other}, not {home / name}, which belongs to {home / 'trainer'}: "
                f"use the console script (tandem-ppo) or `python -P -m`, run from another directory, or rename the other {name}"
            )


_check_not_shadowed()
