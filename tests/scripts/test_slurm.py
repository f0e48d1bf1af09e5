"""scripts/slurm/multinode.sh with stand-ins for Slurm, Ray and the program."""

import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.layout.source import ROOT

SCRIPT = ROOT / "scripts/slurm/multinode.sh"
CALLED = (
    "#!/usr/bin/env bash\n"
    'echo "$(basename "$0") $*${RAY_ADDRESS:+ [$RAY_ADDRESS]}${RAY_AUTH_TOKEN:+ $RAY_AUTH_MODE}" >>"$CALLS"\n'
)
PROGRAMS = {
    "scontrol": CALLED + 'printf "n%s\\n" 1 2 3\n',
    # A step runs on this machine; the last arguments are its command.
    "srun": CALLED + 'while [[ "$1" == --* ]]; do shift; done\n'
    '[ "$1" != hostname ] || { echo "10.0.0.1 fe80::1"; exit; }\nexec "$@"\n',
    "ray": CALLED + '[ "$1" = status ] || exec sleep 600\n',
    # A run waits for its nodes.
    "python": CALLED + 'until [ "$SLURM_JOB_NUM_NODES" = 1 ] || grep -q "ray start .*--address" "$CALLS"; do sleep 0.02; done\n'
    'trap "echo python USR1 >>$CALLS; exit 138" USR1\ntrap "echo python TERM >>$CALLS; exit 143" TERM\n'
    '[ -z "${WAITS:-}" ] || { touch "$WAITS"; while :; do sleep 0.05; done; }\nexit "${CODE:-0}"\n',
}  # fmt: skip

RAY = 'env -u RAY_ADDRESS ray start --block --disable-usage-stats --resources={"tandem_slot": 4}'


def environment(folder: Path, **more: str) -> dict[str, str]:
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4", "SLURM_SUBMIT_DIR": str(folder), **more,
    }  # fmt: skip


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def alive(folder: Path) -> list[str]:
    """Environments of the stand-ins' live processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or gone by now
            found.append(path.read_bytes())
    return [str(text) for text in found if f"CALLS={folder}/calls".encode() in text]


def test_ray_runs_on_all_nodes_and_the_program_on_the_first(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "algorithm=grpo", "data.x=a b"], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = calls(tmp_path)
    assert called[0] == "scontrol show hostnames n[1-3]"
    assert called[1] == "srun --nodes=1 --ntasks=1 --nodelist=n1 hostname --ip-address"
    address = "10.0.0.1:23456"
    assert any(
        line.startswith(f"srun --nodes=1 --ntasks=1 --nodelist=n1 {RAY}") and
        "--head --node-ip-address=10.0.0.1 --port=23456 --include-dashboard=false" in line for line in called
    )  # fmt: skip
    there = f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --exclude=n1 {RAY}"
    assert any(line.startswith(f"{there} --address={address}") for line in called)
    run = "python -m trainer.main_ppo trainer.nnodes=3 trainer.n_gpus_per_node=4 algorithm=grpo data.x=a b"
    assert f"{run} [{address}] token" in called
    assert all(line.endswith("token") for line in called if line.startswith(("ray", "python")))
    assert alive(tmp_path) == [], "its processes end with the script"


def test_one_node_starts_no_cluster(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "a=1"], env=environment(tmp_path, SLURM_JOB_NUM_NODES="1", CODE="4"), capture_output=True)
    assert done.returncode == 4
    assert calls(tmp_path) == ["python -m trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=4 a=1"]


def test_script_runs_in_the_submission_directory_with_its_environment(tmp_path: Path) -> None:
    (tmp_path / "project/.venv/bin").mkdir(parents=True)
    python = tmp_path / "project/.venv/bin/python"
    python.write_text('#!/usr/bin/env bash\necho "$PWD"\n')
    python.chmod(0o755)
    env = environment(tmp_path, SLURM_JOB_NUM_NODES="1", SLURM_SUBMIT_DIR=str(tmp_path / "project"))
    assert subprocess.run([SCRIPT], env=env, capture_output=True, text=True).stdout == f"{tmp_path}/project\n"


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_of_the_job_is_the_programs(tmp_path: Path, code: int) -> None:
    assert subprocess.run([SCRIPT], env=environment(tmp_path, CODE=str(code)), capture_output=True).returncode == code


@pytest.mark.parametrize("nodes", ["3", "1"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_signal_of_the_batch_system_reaches_the_program(tmp_path: Path, number: signal.Signals, code: int, nodes: str) -> None:
    waits = tmp_path / "waits"
    env = environment(tmp_path, WAITS=str(waits), SLURM_JOB_NUM_NODES=nodes)
    script = subprocess.Popen([SCRIPT], env=env, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not waits.exists():
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.02)
    script.send_signal(number)
    assert script.wait(20) == code
    assert f"python {number.name.removeprefix('SIG')}" in calls(tmp_path) and alive(tmp_path) == []


def test_a_ray_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "ray").write_text("#!/usr/bin/env bash\nexit 1\n")
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "ray did not start on n1" in done.stderr
    assert not any(line.startswith("python") for line in calls(tmp_path))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck on this machine")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
