"""The experiment scripts: each composes and passes the checks, and says nothing that is so anyway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from configs.argv import groups_of, normalise
from configs.schema.ppo import PPOConfig
from tests.experiments import EXPERIMENTS, started_by
from trainer.main_ppo import PROGRAM

ROOT_NAME = "ppo_trainer"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_is_a_run_that_could_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a model, data or a GPU. A note would say that a key has no effect, or an odd one; a layout's says who is where,
    others what verl does otherwise."""
    monkeypatch.chdir(tmp_path)
    flag, module, *words = started_by(name, "trainer.dry_run=config")
    assert (flag, module, words[-1]) == ("-m", PROGRAM.name, "trainer.dry_run=config"), "what is typed comes last, and wins"
    assert PROGRAM(words) == 0
    told = capsys.readouterr()
    notes = [line for line in told.err.splitlines() if line.startswith("note: ")]
    assert [
        note for note in notes if not note.startswith("note: placement.layout=") and ": results differ from verl's" not in note
    ] == []
    assert list(tmp_path.iterdir()) == []
    directories = [line.rpartition(" ")[2] for line in told.out.splitlines() if "configuration is fine" in line]
    assert len(directories) == len({*directories}) == (6 if name.startswith("sweep_") else 1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_says_nothing_twice_and_nothing_that_is_so_anyway(name: str) -> None:
    _, _, *words = started_by(name)
    command = normalise(words, PPOConfig, ROOT_NAME)
    assert len(command.flags) + len(command.overrides) == len(words), "a key is there twice, or one that is left out"
    swept = [word for word in command.overrides if OverridesParser.create().parse_override(word).is_sweep_override()]
    assert list(said_anyway([word for word in command.overrides if word not in swept])) == []


def said_anyway(overrides: list[str]) -> Iterator[str]:
    """Those without which the configuration would be the same."""
    whole, groups = composed(overrides), composed([word for word in overrides if is_group(word)])
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        if is_group(word):
            if composed([other for other in overrides if other != word]) == whole:
                yield word
        elif value_if(whole, key, written(groups, key)) == value_of(whole, key):
            yield word


def composed(overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_module("configs", version_base="1.3"):
        return hydra.compose(ROOT_NAME, overrides)


def is_group(word: str) -> bool:
    return word.partition("=")[0] in groups_of(ROOT_NAME)


def written(tree: DictConfig, key: str) -> Any:
    """The value as it stands there, be it a reference to another; None also where there is no such key, in a free form."""
    node: Any = OmegaConf.to_container(tree, resolve=False)
    for name in key.split("."):
        node = node.get(name)
    return node


def value_if(tree: DictConfig, key: str, text: Any) -> Any:
    """What ``key`` means in ``tree`` if ``text`` is written there."""
    changed = tree.copy()
    OmegaConf.update(changed, key, text, merge=False)
    return value_of(changed, key)


def value_of(tree: DictConfig, key: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.select(tree, key)}))
