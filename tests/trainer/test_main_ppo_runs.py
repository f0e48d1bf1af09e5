"""Command lines of verl's users, run for real: two steps, a clean end. On two workers: scripts/test.sh soak."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from data_preprocess import tiny_model
from data_preprocess.writer import rl_row, write
from tests.trainer.verl_commands import LONG_ANSWERS, SMALL_BATCH, SMALL_RUN
from trainer import main_ppo


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads text, and two small data sets at the paths of the command lines."""
    folder = tmp_path_factory.mktemp("verl")
    alphabet = "".join(map(chr, range(32, 127)))
    tiny_model.main([f"--save_dir={folder / 'model'}", "--hidden_size=32", f"--alphabet={alphabet}"])
    for place, source in (("data", "openai/gsm8k"), ("data/math", "sort_digits")):
        for split, n in (("train", 24), ("test", 5)):
            rows = [
                rl_row(data_source=source, prompt=f"{i} + {i} = ?", ability="math", ground_truth=str(2 * i), split=split, index=i)
                for i in range(n)
            ]
            write(rows, folder / place, split)
    return folder


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        pytest.param(SMALL_BATCH, ("trainer.backend=local", "trainer.n_gpus_per_node=1"), id="small_batch"),
        pytest.param(SMALL_BATCH, (), id="small_batch_two_workers", marks=pytest.mark.soak),
        pytest.param(LONG_ANSWERS, (), id="long_answers_two_workers", marks=pytest.mark.soak),
    ],
)
def test_verl_command_lines_train_unchanged(
    command: str,
    workers: tuple[str, ...],
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """bash reads the text, and the program gets the words in this process."""
    small = [f"actor_rollout_ref.model.path={task}/model", f"critic.model.path={task}/model", *SMALL_RUN, *workers]
    shell = f"python3() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    environment = {"DATA_DIR": f"{task}/data", "TIME": "now", "TANDEM_TEST_RUN": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
    module, *words = read.stdout.removesuffix("\0").split("\0")[1:]
    assert module == "trainer.main_ppo"
    monkeypatch.chdir(tmp_path)
    code = main_ppo.PROGRAM([*words, *small])
    out, err = capfd.readouterr()
    assert code == 0 and "Traceback" not in err, err
    (log,) = tmp_path.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert {"critic/vf_loss", "actor/pg_loss", "critic/values/mean", "timing_s/update_critic"} <= steps[0].keys(), "PPO with GAE"
    assert "val/accuracy" in steps[1] and "actor/kl_loss" not in steps[0]
    for word in ("tensor_model_parallel_size", "gpu_memory_utilization"):
        assert sum(word in line and "no effect" in line for line in err.splitlines()) == 1
    if "wandb" in command:
        assert sum(line.startswith("logger wandb left out") for line in err.splitlines()) == 1
    assert out.splitlines()[-1].startswith("report: ")
    assert survivors(str(tmp_path)) == []


def survivors(mark: str) -> list[str]:
    """Processes that the run left behind, found by their inherited environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TANDEM_TEST_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:  # of another user, or no longer running
            continue
    return found
