"""Hydra takes a plugin from modules below this name alone."""

from configs.sweeps.slurm import SlurmLauncher as Launcher


class SlurmLauncher(Launcher):
    """hydra/launcher=submitit_slurm."""
