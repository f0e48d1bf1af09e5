"""Experiment scripts: each composes, passes the checks, and sets no key to the value that it has already."""

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
def test_script_passes_the_checks_without_warnings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a model, data or a GPU. Notes on the placement, and on differences from verl, are expected; others report a key
    without effect."""
    monkeypatch.chdir(tmp_path)
    flag, module, *words = started_by(name, "trainer.dry_run=config")
    assert (flag, module, words[-1]) == ("-m", PROGRAM.name, "trainer.dry_run=config"), (
        "arguments come last and override the script's"
    )
    assert PROGRAM(words) == 0
    output = capsys.readouterr()
    notes = [line for line in output.err.splitlines() if line.startswith("note: ")]
    assert [
        note for note in notes if not note.startswith("note: placement.layout=") and ": results differ from verl's" not in note
    ] == []
    assert list(tmp_path.iterdir()) == []
    directories = [line.rpartition(" ")[2] for line in output.out.splitlines() if "configuration is fine" in line]
    assert len(directories) == len({*directories}) == (6 if name.startswith("sweep_") else 1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_script_sets_each_key_once_and_none_to_its_default(name: str) -> None:
    _, _, *words = started_by(name)
    command = normalise(words, PPOConfig, ROOT_NAME)
    assert len(command.flags) + len(command.overrides) == len(words), "a key is repeated, or is one that is left out"
    swept = [word for word in command.overrides if OverridesParser.create().parse_override(word).is_sweep_override()]
    assert list(redundant([word for word in command.overrides if word not in swept])) == []


def redundant(overrides: list[str]) -> Iterator[str]:
    """Overrides without which the configuration would be the same."""
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
    """Unresolved value of a key, possibly a reference; None also if a free-form block has no such key."""
    node: Any = OmegaConf.to_container(tree, resolve=False)
    for name in key.split("."):
        node = node.get(name)
    return node


def value_if(tree: DictConfig, key: str, text: Any) -> Any:
    """Value of ``key`` in ``tree`` after it is set to ``text``."""
    changed = tree.copy()
    OmegaConf.update(changed, key, text, merge=False)
    return value_of(changed, key)


def value_of(tree: DictConfig, key: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.select(tree, key)}))
