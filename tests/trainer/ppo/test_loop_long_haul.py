"""Five hundred steps with validation, checkpoints and report: no memory or file count grows. Long: scripts/test.sh soak."""

import json
import statistics
from pathlib import Path

import pytest

from tests.long_haul import Sample, watch
from tests.runs import make_task, metrics_of, ppo_arguments
from trainer.checkpoint.resume import checkpoint_steps

STEPS, WARM, WINDOW = 500, 50, 50


def over(samples: list[Sample], role: str, first: int, last: int) -> list[Sample]:
    return [sample for sample in samples if role in sample.processes and first < sample.step <= last]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_resources_do_not_grow_over_five_hundred_steps(tmp_path: Path) -> None:
    """Memory is compared as the median of WINDOW steps: right after WARM steps, and at the end, before shutdown."""
    task, run_dir = make_task(tmp_path / "task", train_size=64, test_size=8), tmp_path / "run"
    arguments = ppo_arguments(
        task, run_dir, "trainer.backend=ray", "trainer.logger=[console,tensorboard]", "reward.num_workers=1",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=true", "trainer.test_freq=25", "trainer.save_freq=50", "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.rollout_data_dir={run_dir / 'rollouts'}",
    )  # fmt: skip
    samples = watch(arguments, run_dir, tmp_path / "store")
    assert len(metrics_of(run_dir)) == STEPS + 1 and checkpoint_steps(run_dir) == [STEPS - 50, STEPS]
    assert (run_dir / "report.html").exists()
    for role in ("driver", "worker"):
        early, late = over(samples, role, WARM, WARM + WINDOW), over(samples, role, STEPS - WINDOW, STEPS - 1)
        before, after = (statistics.median(sample.processes[role].rss for sample in part) for part in (early, late))
        numbers = [(sample.processes[role].descriptors, sample.processes[role].threads) for sample in early + late]
        print(f"{role}: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB, {sorted(set(numbers))} descriptors and threads")
        assert after < 1.03 * before
        assert max(n for n, _ in numbers) - min(n for n, _ in numbers) <= 2
    store = json.loads((tmp_path / "store").read_text())
    print(f"object store: {store}")
    assert store["made"] > STEPS and store["objects"] == store["bytes"] == 0
    first, last = (next(sample for sample in part if WARM < sample.step < STEPS) for part in (samples, reversed(samples)))
    for name, growth in (("logs", last.logs - first.logs), ("Ray's logs", last.ray_logs - first.ray_logs)):
        print(f"{name}: {growth / (last.step - first.step):.0f} bytes a step")
        assert growth < 1000 * (last.step - first.step)
