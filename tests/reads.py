"""Record which leaves of trainer.main_ppo's configuration are read, and by which module, while code runs in this process."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, get_type_hints

import pytest

from configs.base.keys import followed, keys_of
from configs.schema.ppo import PPOConfig
from configs.schema.scoring_model import ScoringModelConfig

REPLACE = getattr(dataclasses, "_replace", dataclasses.replace).__code__
"""The function that copies a node with other values: dataclasses.replace, from Python 3.13 on a helper below it."""
GENERATED = "<string>"
"""File name of the methods that dataclasses generate: they compare and print."""
CHECKS = ("check", "_check")
"""Prefixes of functions that only check whether a value is valid."""
_recording: list["Reads"] = []


class Reads:
    """leaves: those that were read, with the first module that read each.

    A leaf is known by the place of its node. A copy has the place of its original: by dataclasses.replace, by unpickling, and any
    node whose class has only one place. If asdict turns a part of the tree into a dictionary, its look-ups count; of the complete
    tree it is a dump, which does not. Functions that check, copy, compare or print do not count as readers.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, str] = {}
        self._places: dict[int, tuple[Any, str]] = {}

    def set_place(self, node: Any, place: str) -> None:
        """place: the dotted key of the node and a dot; empty for the root. Nodes below it get places too if they have none."""
        self._places[id(node)] = node, place  # keeps the node alive: its id is not reused
        for field in dataclasses.fields(node):
            value = object.__getattribute__(node, field.name)
            if type(value) in places() and id(value) not in self._places:
                self.set_place(value, f"{place}{field.name}.")

    def place(self, node: Any) -> str | None:
        """None if it is unknown: of a node that was constructed directly."""
        if id(node) not in self._places:
            (only, *more) = places()[type(node)]
            if more:
                return None
            self.set_place(node, only)
        return self._places[id(node)][1]

    def saw(self, place: str | None, names: Iterable[str], frame: FrameType) -> None:
        for leaf in {leaf_of(f"{place}{name}") for name in names} if place is not None else ():
            if leaf is not None and leaf not in self.leaves and (reader := reader_of(frame)) is not None:
                self.leaves[leaf] = reader


class ReadDict(dict[str, Any]):
    """A part of the tree as returned by asdict."""

    saw: Callable[[Iterable[str], FrameType], None]

    def __getitem__(self, name: str) -> Any:
        self.saw([name], sys._getframe(1))
        return super().__getitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self.saw([name], sys._getframe(1))
        return super().pop(name, *default)

    def items(self) -> Any:
        self.saw(self, sys._getframe(1))
        return super().items()


@contextmanager
def recorded() -> Iterator[Reads]:
    reads, patch, as_dictionary = Reads(), pytest.MonkeyPatch(), dataclasses._asdict_inner  # type: ignore[attr-defined]

    def as_read_dict(node: Any, factory: Any) -> Any:
        values, caller = as_dictionary(node, factory), sys._getframe(1)
        if type(node) in places() and caller.f_code is dataclasses.asdict.__code__:
            values, place = ReadDict(values), reads.place(node)
            values.saw = lambda names, frame: reads.saw(place, names, frame)
        return values

    for kind in places():
        patch.setattr(kind, "__getattribute__", _looking(reads))
        patch.setattr(kind, "__init__", _copying(reads, kind.__init__))
        patch.setattr(kind, "__reduce_ex__", _reducing(reads))
    patch.setattr(dataclasses, "_asdict_inner", as_read_dict)
    _recording.append(reads)
    try:
        yield reads
    finally:
        _recording.remove(reads)
        patch.undo()


def _looking(reads: Reads) -> Callable[[Any, str], Any]:
    def look(node: Any, name: str) -> Any:
        if name in type(node).__dataclass_fields__:
            reads.saw(reads.place(node), [name], sys._getframe(1))
        return object.__getattribute__(node, name)

    return look


def _copying(reads: Reads, init: Callable[..., None]) -> Callable[..., None]:
    def made(node: Any, **values: Any) -> None:
        init(node, **values)
        caller = sys._getframe(1)
        if caller.f_code is REPLACE and (place := reads.place(caller.f_locals[REPLACE.co_varnames[0]])) is not None:
            reads.set_place(node, place)

    return made


def _reducing(reads: Reads) -> Callable[[Any, int], Any]:
    def reduce(node: Any, protocol: int) -> Any:
        values = {field.name: object.__getattribute__(node, field.name) for field in dataclasses.fields(node)}
        return _unpickled, (type(node), values, reads.place(node))

    return reduce


def _unpickled(kind: type, values: dict[str, Any], place: str | None) -> Any:
    node = kind(**values)
    for reads in _recording:
        if place is not None:
            reads.set_place(node, place)
    return node


@cache
def places() -> dict[type, list[str]]:
    """Places of the classes of the tree; entries of reward.models are made from its defaults."""
    found: dict[type, list[str]] = {ScoringModelConfig: ["reward.reward_model."]}

    def walk(kind: type, place: str) -> None:
        found.setdefault(kind, []).append(place)
        for field in dataclasses.fields(kind):
            inner = keys_of(kind).leaves.get(field.name)
            inner = followed(inner) if inner is not None else get_type_hints(kind)[field.name]
            if inner is not None:
                walk(inner, f"{place}{field.name}.")

    walk(PPOConfig, "")
    return found


@cache
def leaf_of(key: str) -> str | None:
    """The leaf that is read with this key; None for a node. A block that follows another is read with the leaves in it."""
    leaves = keys_of(PPOConfig).leaves
    if key in leaves:
        return key if followed(leaves[key]) is None else None
    return next((leaf for leaf in leaves if key.startswith(f"{leaf}.")), None)


def reader_of(frame: FrameType | None) -> str | None:
    """The reading module; None for one that copies, compares, prints or checks. configs reads on behalf of its callers."""
    reader = None
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if code.co_qualname.startswith(CHECKS) or module in ("trainer.cli.preflight", "configs.clamp"):
            return None
        if reader is None and (module == "dataclasses" or code.co_filename == GENERATED):
            return None
        if reader is None and module != __name__ and not module.startswith("configs."):
            reader = module
        frame = frame.f_back
    return reader
