"""User files with a fault at a chosen call: real signals, real deaths, a real allocator's error."""

from pathlib import Path

from tests.runs import REWARD

TOO_MUCH = "torch.empty(2**50, dtype=torch.uint8)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
IMPORTS = "import os, signal, time\nfrom pathlib import Path\n"
COUNT = """
def call(name):
    "The how-manieth call this is, over all processes that there ever were."
    with (HERE / name).open("a") as file:
        file.write(".")
        return file.tell()
"""


def loss_that(folder: Path, fault: str) -> str:
    """loss_mode: the plain loss, with ``fault`` run before each call. The fault sees n, counted from 1, and the imports below."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loss.py").write_text(
        f"{IMPORTS}import torch\nimport torch.distributed as dist\nfrom trainer.algorithms.policy_losses import POLICY_LOSSES\n"
        f"HERE = Path({str(folder)!r})\n{COUNT}\n"
        f"def loss(inputs, config):\n    n = call('losses')\n    {fault}\n    return POLICY_LOSSES['vanilla'](inputs, config)\n"
    )
    return f"actor_rollout_ref.actor.policy_loss.loss_mode={folder}/loss.py:loss"


def reward_that(folder: Path, fault: str) -> str:
    """The reward of tests/runs, with ``fault`` run before each call; n as in loss_that. For reward.num_workers=0."""
    folder.mkdir(parents=True, exist_ok=True)
    score = REWARD.replace("    return", f"    n = call('rewards')\n    {fault}\n    return")
    (folder / "reward.py").write_text(f"{IMPORTS}HERE = Path({str(folder)!r})\n{COUNT}\n{score}")
    return f"reward.custom_reward_function.path={folder}/reward.py"
