"""Load configs/openrlhf.yaml: the translation of each flag of OpenRLHF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from configs.base.keys import CONFIG_DIR

Settings = Mapping[str, Any]
"""{target key: value}. A text comes from the command line and is converted to the key's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag. name: the older spelling, or the newer one if there is none. Other fields: head of configs/openrlhf.yaml."""

    name: str
    newer: tuple[str, ...]
    takes: int | str = 1
    to: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    also: Settings = field(default_factory=dict)
    values: Mapping[str, Any] | None = None
    default: Any = None
    newer_default: Any = None
    absent: Settings = field(default_factory=dict)
    note: str = ""
    implied: str = ""
    none: str = ""
    rule: str = ""
    secret: bool = False

    def is_of(self, newer: bool) -> bool:
        """Whether the newer (else the older) command line has this flag."""
        return bool(self.newer) if newer else "." not in self.name

    def words(self, newer: bool) -> tuple[str, ...]:
        """Default values for an absent flag; () without a default."""
        value = self.newer_default if newer and self.newer_default is not None else self.default
        return () if value is None else tuple(map(str, value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True)
class FlagSource:
    """A program of OpenRLHF. program: its counterpart here. root: the counterpart's YAML.

    always: behaviour of OpenRLHF that no flag controls, as (reason, settings).
    """

    name: str
    program: str
    root: str
    flags: Mapping[str, Flag]
    always: tuple[tuple[str, Settings], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Contents of configs/openrlhf.yaml. others: {program without a counterpart: reason}."""

    sources: Mapping[str, FlagSource]
    others: Mapping[str, str]


@cache
def openrlhf() -> Table:
    """The parsed table."""
    tree: Any = yaml.safe_load((CONFIG_DIR / "openrlhf.yaml").read_text(encoding="utf-8"))
    sources = {}
    for name, entry in tree["programs"].items():
        flags: dict[str, Any] = {}
        for group in entry.get("groups", []):
            flags |= tree["groups"][group]
        flags |= entry["flags"]
        sources[name] = FlagSource(
            name,
            entry["program"],
            entry["root"],
            {older: _flag(older, fields) for older, fields in flags.items()},
            tuple((item["why"], item["set"]) for item in entry.get("always", [])),
        )
    return Table(sources, tree["others"])


def _flag(name: str, fields: Mapping[str, Any]) -> Flag:
    newer = tuple(fields.get("newer", name if "." in name else "").split())
    lists = {key: tuple(fields[key].split()) for key in ("to", "spread") if key in fields}
    return Flag(name=name, **{**fields, **lists, "newer": newer})
