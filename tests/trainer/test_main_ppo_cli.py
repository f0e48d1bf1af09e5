"""The command line of trainer.main_ppo as a user runs it: in separate processes."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from configs.base.keys import CONFIG_DIR
from tests.runs import make_task, metrics_of, ppo_arguments
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


def test_the_command_runs_where_the_user_has_folders_of_our_names(tmp_path: Path) -> None:
    """Folders with an __init__.py hide installed packages: Ray's workers and scoring processes must not import from there."""
    make_task(tmp_path)
    for name in ("trainer", "workers", "configs", "data_preprocess"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the folder of the user')")
    script = tmp_path / "bin" / "tandem-ppo"  # as pip writes it
    script.parent.mkdir()
    script.write_text("import sys\nfrom trainer.main_ppo import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    small = [word for word in ppo_arguments(Path(), Path("run")) if word not in ("trainer.backend=local", "reward.num_workers=0")]
    small += ["trainer.backend=ray", "trainer.n_gpus_per_node=2", "reward.num_workers=1", "trainer.total_training_steps=1"]
    command = [sys.executable, str(script), *small]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(tmp_path / "run")) == 1
    hidden = main_ppo("trainer.dry_run=config", cwd=tmp_path)
    assert hidden.returncode != 0 and "the folder of the user" in hidden.stderr
    safe = [sys.executable, "-P", "-m", "trainer.main_ppo", "recipe=quickstart", "trainer.dry_run=config"]
    assert subprocess.run(safe, cwd=tmp_path, env=ENVIRONMENT, capture_output=True).returncode == 0
