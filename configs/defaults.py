"""The defaults of the YAML with a few changes, without a command line: for callers of a single function."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.keys import CONFIG_DIR, keys_of
from configs.load import load_ppo
from configs.schema.ppo import PPOConfig


def ppo_config(nodes: tuple[str, ...] = (), changes: Mapping[str, Any] | None = None) -> PPOConfig:
    """configs/ppo_trainer.yaml with ``changes``: leaves right below one of ``nodes``, by their last names, checked as a user's.

    Raises ValueError.
    """
    if not changes:
        return _defaults()
    known = {key.rpartition(".")[2]: key for key in keys_of(PPOConfig).leaves if key.rpartition(".")[0] in nodes}
    unknown = sorted(changes.keys() - known.keys())
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such option; there are {', '.join(sorted(known))}")
    tree = _tree().copy()
    for name, value in changes.items():
        OmegaConf.update(tree, known[name], value)
    return load_ppo(tree)


@cache
def _defaults() -> PPOConfig:
    return load_ppo(_tree())


@cache
def _tree() -> DictConfig:
    """The root alone: without Hydra, whose groups set nothing unless they are asked for."""
    tree = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    assert isinstance(tree, DictConfig)
    del tree["defaults"]
    return tree
