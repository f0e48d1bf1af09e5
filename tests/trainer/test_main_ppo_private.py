"""Access from outside and leaks of secrets: complete runs, observed from outside."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_preprocess import tiny_model
from tests.conftest import descendants
from tests.layout.source import ROOT
from tests.pickles import malicious_pickle
from tests.runs import REWARD, make_task, ppo_arguments, run_ppo
from trainer import main_ppo

SECRET = "s3cret-9f2c"
ENVIRONMENT = {name: f"{SECRET}-{name}" for name in ("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN")}
# The user's own YAML: secrets where they are not allowed, and one where it is.
OWN_YAML = f"""
defaults: [ppo_trainer, _self_]
reward:
  custom_reward_function:
    reward_kwargs:
      api_token: {SECRET}
      endpoint: https://user:{SECRET}@host/v1
      headers: "Bearer ${{oc.env:OPENAI_API_KEY}}"
"""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"), train_size=64, sft_size=8)
    tiny_model.main([f"--save_dir={folder / 'base'}", "--num_attention_heads=6", "--num_key_value_heads=2", "--hidden_size=192"])
    (folder / "reward.py").write_text(REWARD.replace("extra_info)", "extra_info, **unused)"))
    (folder / "own.yaml").write_text(OWN_YAML)
    return folder


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    """stderr is merged into stdout."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.main_ppo", *arguments],
        cwd=cwd, env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, umask=0o022,
    )  # fmt: skip


def files_with_the_secret(folder: Path) -> Iterator[str]:
    # os.walk passes over a directory that is renamed meanwhile; glob raises.
    for path in (Path(parent) / name for parent, _, names in os.walk(folder) for name in names):
        try:
            if path.is_file() and SECRET.encode() in path.read_bytes():
                yield str(path)
        except FileNotFoundError:  # removed in the meantime
            continue


def listening() -> Iterator[tuple[str, str, int]]:
    """(process, address, port) of all sockets on which child processes accept connections."""
    actual = set(descendants())
    names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"]) if process in actual}
    for socket in psutil.net_connections("inet"):
        is_open = socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr)
        if is_open and socket.pid in names:
            yield names[socket.pid], socket.laddr.ip, socket.laddr.port


def test_run_listens_on_loopback_only_and_writes_no_secret(task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ppo_arguments(
        task, run_dir,
        "algorithm=ppo", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "reward.num_workers=2",
        "trainer.logger=[console,tensorboard]", "trainer.save_freq=1", "trainer.test_freq=1",
        f"trainer.rollout_data_dir={run_dir}/rollouts", "trainer.total_training_steps=1",
    )  # fmt: skip
    run = start(["--config-dir", str(task), "--config-name", "own", *arguments], tmp_path)
    sockets: set[tuple[str, str, int]] = set()
    leaks: set[str] = set()
    while run.poll() is None:
        sockets |= set(listening())
        leaks |= set(files_with_the_secret(run_dir))  # Ray's own logs exist only while it runs
        time.sleep(1.0)
    message, _ = run.communicate()
    assert run.returncode == 0, message
    assert SECRET not in message
    assert leaks | set(files_with_the_secret(tmp_path)) == set()
    assert {"config.yaml", "environment.json", "manifest.json", "report.html"} <= {path.name for path in run_dir.rglob("*")}
    assert {name for name, address, port in sockets if address not in LOOPBACK} == set(), sockets
    assert any("gcs_server" in name for name, _, _ in sockets) and any("raylet" in name for name, _, _ in sockets)
    assert any(name.startswith("ray::") for name, _, _ in sockets), "the workers' TCPStore and gloo"


def test_failed_run_reports_no_secret(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The key is used here: each error names the address that it was sent to, and why no reply came."""
    judge = ("reward.scorer=judge", "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m", "reward.judge.retries=0")
    alone = ("reward.custom_reward_function.path=null", "reward.judge.prompt='{answer}'", "reward.num_workers=1")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    code = main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *judge, *alone))
    message = "".join(capfd.readouterr())
    assert code == 2 and "http://127.0.0.1:1/v1/chat/completions" in message, message
    assert SECRET not in message and list(files_with_the_secret(tmp_path)) == []


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--info", "config"]])
def test_printed_configuration_has_no_secrets(flags: list[str], task: Path, tmp_path: Path) -> None:
    run = start(["--config-dir", str(task), "--config-name", "own", *flags], tmp_path)
    message, _ = run.communicate()
    assert run.returncode == 0 and "api_token: '***'" in message and "endpoint: https://***@host/v1" in message
    assert SECRET not in message


@pytest.mark.parametrize(
    ("word", "key"),
    [
        (f"ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={SECRET}", "ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN"),
        (
            f"+reward.custom_reward_function.reward_kwargs={{api_key: {SECRET}}}",
            "reward.custom_reward_function.reward_kwargs.api_key",
        ),
        (f"no.such.api_key={SECRET}", "no.such.api_key"),
        (f"reward.judge.url=https://user:{SECRET}@host/v1", "reward.judge.url"),
    ],
)
def test_secret_on_the_command_line_is_refused(
    word: str, key: str, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main_ppo.PROGRAM([*ppo_arguments(task, tmp_path / "run"), word])
    message = "".join(capfd.readouterr())
    assert code == 2 and message.startswith(f"error: {key}: a secret on the command line") and message.count("\n") == 1
    assert SECRET not in message and list(files_with_the_secret(tmp_path)) == []


def test_no_pickle_is_loaded(task: Path, tmp_path: Path) -> None:
    """Neither in a model directory nor in a checkpoint, whatever its name."""
    data = malicious_pickle(tmp_path / "trace")
    shutil.copytree(task / "base", tmp_path / "base")
    run_dir = tmp_path / "run"
    overrides = ("trainer.save_freq=1", f"actor_rollout_ref.model.path={tmp_path / 'base'}", "trainer.resume_mode=auto")
    for steps in (1, 2):
        for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "tokenizer.pkl"):
            (tmp_path / "base" / name).write_bytes(data)
        for folder in run_dir.glob("global_step_*/actor"):
            for name in (".metadata", "optimizer.pt", "__0_0.distcp", "extra_state.pkl"):
                (folder / name).write_bytes(data)
        assert len(run_ppo(task, run_dir, *overrides, f"trainer.total_training_steps={steps}")) == steps
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("private", [False, True])
def test_permissions_follow_the_umask_unless_the_run_is_private(private: bool, task: Path, tmp_path: Path) -> None:
    run_dir, dumps = tmp_path / "run", tmp_path / "dumps"
    before = os.umask(0o022)
    try:
        words = ("trainer.total_training_steps=1", "trainer.save_freq=1", f"trainer.rollout_data_dir={dumps}")
        run_ppo(task, run_dir, *words, f"trainer.private={str(private).lower()}")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run_dir, dumps)] == [0o700 if private else 0o755] * 2
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600 if private else 0o644}, files


def test_names_in_the_data_become_no_paths(task: Path, tmp_path: Path) -> None:
    """Data sources and responses become names of metrics and cells of tables, never files."""
    rows = pq.read_table(task / "test.parquet").to_pylist()
    for i, row in enumerate(rows):
        row["data_source"] = f"../../{'escaped' if i % 2 else '/escaped'}"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "odd.parquet")
    run_dir = tmp_path / "a/b/run"
    odd = f"data.val_files={tmp_path / 'odd.parquet'}"
    steps = run_ppo(
        task, run_dir, odd, "trainer.test_freq=1", "trainer.logger=[tensorboard]", f"trainer.rollout_data_dir={run_dir}/rollouts",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert "val-core/../../escaped/reward/mean@1" in steps[-1]
    outside = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert outside == {"a", "odd.parquet"} and [path.name for path in (tmp_path / "a/b").iterdir()] == ["run"]
    assert not [path for path in tmp_path.rglob("*") if "escaped" in path.name]
