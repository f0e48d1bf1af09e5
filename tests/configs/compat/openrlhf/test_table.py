"""configs/openrlhf.yaml: every flag has one entry, and the keys that it sets exist."""

import pytest

from configs.base.keys import keys_of
from configs.compat.openrlhf.rules import CONVERSIONS, RULES
from configs.compat.openrlhf.script import SCHEMAS
from configs.compat.openrlhf.table import Flag, openrlhf
from tests.configs.compat.openrlhf.flags import FLAGS

SOURCES = openrlhf().sources


def targets(flag: Flag) -> set[str]:
    below = [value for value in (flag.values or {}).values() if isinstance(value, dict)]
    return {*flag.to, *flag.spread, *flag.also, *flag.absent, *(key for value in below for key in value)}


@pytest.mark.parametrize("name", SOURCES)
def test_targets_of_flags_are_keys_of_the_program(name: str) -> None:
    source = SOURCES[name]
    keys = keys_of(SCHEMAS[source.root])
    always = {key for _, settings in source.always for key in settings}
    wanted = set().union(always, *map(targets, source.flags.values()))
    assert len(wanted) > 5
    assert [key for key in wanted if not keys.knows(key)] == []


@pytest.mark.parametrize("name", SOURCES)
def test_every_flag_has_an_effect(name: str) -> None:
    for flag in SOURCES[name].flags.values():
        has_effect = bool(
            targets(flag)
            or flag.remarks.implied
            or flag.remarks.none
            or flag.rule
            or flag.part_of
            or SOURCES[name].parts(flag.name)
        )
        assert has_effect, flag.name
        assert not (flag.rule and (targets(flag) or flag.remarks.none or flag.remarks.implied)), f"{flag.name}: the rule says all"
        if flag.values is not None:
            assert flag.remarks.none or flag.remarks.implied or all(flag.values.values()), f"{flag.name}: {{}} needs `implied`"
            assert flag.default is None or str(flag.default) in flag.values, flag.name
            assert not {*flag.to, *flag.spread}, f"{flag.name}: `values` says all"


def test_every_rule_has_a_flag() -> None:
    named = {flag.rule for source in SOURCES.values() for flag in source.flags.values()} - {""}
    assert named == set(RULES)
    converted = {flag.convert for source in SOURCES.values() for flag in source.flags.values()} - {""}
    assert converted == set(CONVERSIONS)


@pytest.mark.parametrize("name", SOURCES)
def test_part_of_names_a_flag_without_a_rule(name: str) -> None:
    flags = SOURCES[name].flags
    assert [flag.name for flag in flags.values() if flag.part_of and (flag.part_of not in flags or flag.rule)] == []


@pytest.mark.parametrize("name", SOURCES)
def test_spellings_of_flags_are_unique(name: str) -> None:
    spellings = [spelling for flag in SOURCES[name].flags.values() for spelling in {flag.name, *flag.newer}]
    assert sorted(spellings) == sorted(set(spellings))


@pytest.mark.parametrize(("name", "version"), FLAGS)
def test_every_flag_is_in_the_table(name: str, version: str) -> None:
    newer = version == "newer"
    flags = SOURCES[name].flags.values()
    known = {spelling for flag in flags for spelling in ((flag.name, *flag.newer) if newer else (flag.name,))}
    assert [flag for flag in FLAGS[name, version].split() if flag not in known] == []


def test_programs_without_a_counterpart_have_a_reason() -> None:
    others = openrlhf().others
    assert {"train_kto", "train_kd", "train_prm", "serve_rm"} <= others.keys() and all(others.values())
    assert not others.keys() & SOURCES.keys()
