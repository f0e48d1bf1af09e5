"""Hydra takes a plugin from modules below this name alone."""

from configs.sweeps.optuna_sweeper import OptunaSweeper as Sweeper


class OptunaSweeper(Sweeper):
    """configs/hydra/sweeper/optuna.yaml."""
