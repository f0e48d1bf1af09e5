"""No key is dead: tiny runs record which leaves they read, and of the rest a table says which file reads them and why no run here does."""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from configs.defaults import ppo_config
from configs.keys import keys_of
from configs.schema.ppo import PPOConfig
from configs.schema.scoring_model import ScoringModelConfig
from tests.runs import make_task, run_ppo
from trainer import main_ppo

ROOT = Path(__file__).parents[2]
NOT_READING = ("configs.", "dataclasses", "pydantic", "trainer.manifest", "trainer.checkpoint", "trainer.entry")
"""Modules that look at every leaf: the schema and its checks, copies, and what writes or compares whole configurations."""


class Reads:
    """Leaves that were read of the configurations that runs were given."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._places: dict[int, str] = {}
        self._alive: list[Any] = []

    def watch(self, node: Any, prefix: str = "") -> None:
        self._alive.append(node)
        self._places[id(node)] = prefix
        for field in dataclasses.fields(node):
            value = object.__getattribute__(node, field.name)
            if dataclasses.is_dataclass(value):
                self.watch(value, f"{prefix}{field.name}.")

    def saw(self, node: Any, name: str, module: str) -> None:
        if not module.startswith(NOT_READING):
            copied = "reward.reward_model." if issubclass(type(node), ScoringModelConfig) else None
            place = self._places.get(id(node), copied)
            if place is not None:
                self.keys.add(place + name)


@contextmanager
def recorded() -> Iterator[Reads]:
    """While it lasts, runs of main_ppo in this process are recorded."""
    reads, program = Reads(), main_ppo.PROGRAM
    classes = {type(node) for node in _nodes(ppo_config())} | {ScoringModelConfig}

    def look(node: Any, name: str) -> Any:
        reads.saw(node, name, sys._getframe(1).f_globals.get("__name__", ""))
        return object.__getattribute__(node, name)

    def run(config: PPOConfig, notices: list[str]) -> None:
        reads.watch(config)
        program.run(config, notices)

    patch = pytest.MonkeyPatch()
    for kind in classes:
        patch.setattr(kind, "__getattribute__", look)
    patch.setattr(main_ppo, "PROGRAM", dataclasses.replace(program, run=run))
    try:
        yield reads
    finally:
        patch.undo()


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _nodes(value)
