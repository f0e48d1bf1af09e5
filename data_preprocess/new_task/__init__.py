"""Folders that python -m trainer.main_init writes: one for each --from, and the sizes for a CPU and for GPUs."""
