"""Default configurations with a few changed values, for callers of single functions without a command line."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.base.keys import CONFIG_DIR, keys_of
from configs.load import load_ppo
from configs.schema.ppo import PPOConfig


def ppo_config(nodes: tuple[str, ...] = (), changes: Mapping[str, Any] | None = None) -> PPOConfig:
    """configs/ppo_trainer.yaml with ``changes``, validated like a user's configuration.

    changes: values of leaves directly below one of ``nodes``, by the last part of their keys. Raises ValueError.
    """
    if not changes:
        return _defaults()
    known = {key.rpartition(".")[2]: key for key in keys_of(PPOConfig).leaves if key.rpartition(".")[0] in nodes}
    unknown = sorted(changes.keys() - known.keys())
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: unknown option; known: {', '.join(sorted(known))}")
    tree = _tree().copy()
    for name, value in changes.items():
        OmegaConf.update(tree, known[name], value)
    return load_ppo(tree)


@cache
def _defaults() -> PPOConfig:
    return load_ppo(_tree())


@cache
def _tree() -> DictConfig:
    """The root YAML without Hydra: configuration groups set nothing unless they are selected."""
    tree = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    assert isinstance(tree, DictConfig)
    del tree["defaults"]  # Hydra's defaults list, not a key of the schema
    return tree
