"""configs/openrlhf.yaml: every flag is there once and says something, and what it says are keys of ours."""

import pytest

from configs.base.keys import keys_of
from configs.compat.openrlhf.script import RULES
from configs.compat.openrlhf.settings import SCHEMAS
from configs.compat.openrlhf.table import Flag, openrlhf
from tests.configs.compat.openrlhf.flags import FLAGS

SOURCES = openrlhf().sources


def targets(flag: Flag) -> set[str]:
    below = [value for value in (flag.values or {}).values() if isinstance(value, dict)]
    return {*flag.to, *flag.spread, *flag.also, *flag.absent, *(key for value in below for key in value)}


@pytest.mark.parametrize("name", SOURCES)
def test_targets_are_keys_of_ours(name: str) -> None:
    source = SOURCES[name]
    keys = keys_of(SCHEMAS[source.root])
    always = {key for _, settings in source.always for key in settings}
    wanted = set().union(always, *map(targets, source.flags.values()))
    assert len(wanted) > 5
    assert [key for key in wanted if not keys.knows(key)] == []


@pytest.mark.parametrize("name", SOURCES)
def test_every_flag_says_something(name: str) -> None:
    for flag in SOURCES[name].flags.values():
        says = bool(targets(flag) or flag.implied or flag.none or flag.rule)
        assert says, flag.name
        assert not (flag.rule and (targets(flag) or flag.none or flag.implied)), f"{flag.name}: the rule says all"
        if flag.values is not None:
            assert flag.none or flag.implied or all(flag.values.values()), f"{flag.name}: {{}} is said in `implied`"
            assert flag.default is None or str(flag.default) in flag.values, flag.name
            assert not {*flag.to, *flag.spread}, f"{flag.name}: `values` says all"


def test_every_rule_is_there_and_has_a_flag() -> None:
    named = {flag.rule for source in SOURCES.values() for flag in source.flags.values()} - {""}
    assert named == set(RULES)


@pytest.mark.parametrize("name", SOURCES)
def test_no_spelling_stands_for_two_flags(name: str) -> None:
    spellings = [spelling for flag in SOURCES[name].flags.values() for spelling in {flag.name, *flag.newer}]
    assert sorted(spellings) == sorted(set(spellings))


@pytest.mark.parametrize(("name", "version"), FLAGS)
def test_every_flag_of_theirs_is_in_the_table(name: str, version: str) -> None:
    newer = version == "newer"
    flags = SOURCES[name].flags.values()
    known = {spelling for flag in flags for spelling in ((flag.name, *flag.newer) if newer else (flag.name,))}
    assert [flag for flag in FLAGS[name, version].split() if flag not in known] == []


def test_programs_without_a_counterpart_say_why() -> None:
    others = openrlhf().others
    assert {"train_dpo", "train_kto", "train_prm", "serve_rm"} <= others.keys() and all(others.values())
    assert not others.keys() & SOURCES.keys()
