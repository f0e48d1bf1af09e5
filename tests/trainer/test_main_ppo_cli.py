"""The command line of trainer.main_ppo as a user runs it: in separate processes."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from configs.base.keys import CONFIG_DIR
from tests.trainer.verl_commands import LONG_ANSWERS, SMALL_BATCH, SMALL_RUN

ROOT = CONFIG_DIR.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def main_ppo(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.main_ppo", *argv]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--help"], "recipe=quickstart"),
        (["recipe=quickstart", "--cfg", "job", "--resolve"], "default_local_dir: runs/quickstart"),
        (["--info", "defaults"], "ppo_trainer"),
        (["recipe=quickstart", "trainer.dry_run=config"], "configuration is fine"),
    ],
)
def test_help_and_checks_are_fast_and_import_little(argv: list[str], shown: str, tmp_path: Path) -> None:
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        command = [sys.executable, "-X", "importtime", "-m", "trainer.main_ppo", *argv]
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=err, text=True)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        assert process.returncode == 0 and shown in out.read()
        modules = [line.rpartition("|")[2].strip() for line in err]
    imported = {module.partition(".")[0] for module in modules}
    assert "configs" in imported and not imported & {"torch", "ray", "transformers", "numpy"}
    # 530 modules and 1.1 s on an idle core; on a core shared with another test the same work takes twice as long.
    assert len(modules) < 600 and used.ru_utime + used.ru_stime < 4.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [SMALL_BATCH, LONG_ANSWERS], ids=["small_batch", "long_answers"])
def test_verl_command_lines_compose_unchanged(command: str, tmp_path: Path) -> None:
    small = ["actor_rollout_ref.model.path=tiny", "critic.model.path=tiny", *SMALL_RUN, "trainer.dry_run=config"]
    shell = f'python3() {{ "{sys.executable}" "$@" {" ".join(small)}; }}\n{command}'
    result = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=ENVIRONMENT | {"DATA_DIR": "data"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("configuration is fine: 2 workers on cpu")
    output = [line.split()[1] for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert len(output) == len(result.stderr.splitlines()) == len(set(output))
    assert set(output) >= {
        "actor_rollout_ref.model.use_remove_padding",
        "critic.model.use_remove_padding",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    }
    assert list(tmp_path.iterdir()) == []


def test_sweep_of_dry_runs(tmp_path: Path) -> None:
    result = main_ppo("-m", "recipe=quickstart", "trainer.seed=1,2", "trainer.dry_run=config", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    fine = [line for line in result.stdout.splitlines() if line.startswith("configuration is fine")]
    assert [line.rpartition(" ")[2] for line in fine] == ["runs/quickstart/0", "runs/quickstart/1"]
    assert list(tmp_path.iterdir()) == []
