"""hydra/launcher=submitit_slurm with stand-ins for Slurm's programs and the real submitit. Real Slurm: docs/evidence.md."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from submitit import SlurmJob

from configs.base.keys import ConfigError
from configs.sweeps import slurm
from configs.sweeps.slurm import FORGOTTEN, slurm_walltime
from configs.sweeps.sweep_points import INTERRUPTED, Point, read_results
from tests.slurm import stand_in
from tests.trainer.points import PROGRAM, SIGNALLED, STARTS

LOG = "x/.submitit/7_1/7_1_0_log.err"


class Cluster:
    """Sweeps of two trials, the jobs 7_0 and 7_1, and after a restart 8_0 and 8_1."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.rows: list[list[str]] = []
        self.printed: list[str] = []
        self._capsys = capsys

    def __call__(self, *words: str) -> int:
        """Run the sweep; return its exit code."""
        launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")
        code = PROGRAM(["-m", *launcher, "trainer.default_local_dir=x", "trainer.objective=-train/loss", *words])
        out, err = self._capsys.readouterr()
        self.rows = [line.split() for line in out.splitlines()[1:]]
        self.printed = [line for line in err.splitlines() if not line.startswith("trials ")]
        return code

    def ended(self) -> list[list[str]]:
        return [row[:2] for row in self.rows]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    for name, value in stand_in(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    return Cluster(tmp_path / "slurm", capsys)


TRIALS = "optim.lr=0.5,0.25"


def test_trials_stop_before_the_time_limit_and_resume(cluster: Cluster) -> None:
    """Two trials that need three and nine starts: one start each, then as many as submitit may requeue."""
    asked = ("trainer.seed=3,9", "optim.lr=0.5", "hydra.launcher.cpus_per_task=6")
    assert cluster(*asked, "trainer.walltime=77") == 0 and cluster.ended() == [["0", "interrupted"], ["1", "interrupted"]]
    assert not (cluster.folder / "scontrol_calls").exists(), "a job is requeued only with max_num_timeout"
    assert cluster(*asked, "hydra.launcher.timeout_min=10", "hydra.launcher.max_num_timeout=1") == 0
    assert [row[:3] for row in cluster.rows] == [["0", "finished", "-0.5"], ["1", "interrupted", "-"]]
    assert sorted((cluster.folder / "scontrol_calls").read_text().splitlines()) == ["requeue 8_0", "requeue 8_1"]
    for trial in "01":
        assert Path("x", trial, STARTS).read_text().split() == ["77", "360", "360"]
    script = (cluster.folder / "batch_8.sh").read_text().splitlines()
    assert {line for line in script if line.startswith("#SBATCH")} >= {
        "#SBATCH --array=0-1%2", "#SBATCH --partition=gpu", "#SBATCH --time=10", "#SBATCH --gpus-per-node=8", "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --signal=USR2@120", "#SBATCH --cpus-per-task=6", "#SBATCH --job-name=tandem",
    }  # fmt: skip
    (step,) = [line for line in script if line.startswith("srun ")]
    assert "--cpus-per-task=6" in step.split(), "a step does not inherit the job's"


@pytest.mark.parametrize(
    ("state", "status", "code"), [("CANCELLED", "interrupted", 137), pytest.param("FAILED", "failed", 1, marks=pytest.mark.soak)]
)
def test_a_job_ended_by_slurm_is_reported_and_the_others_finish(cluster: Cluster, state: str, status: str, code: int) -> None:
    (cluster.folder / "over_7_1").write_text(state)
    assert cluster(TRIALS) == code
    assert cluster.ended() == [["0", "finished"], ["1", status]] and cluster.rows[1][4:] == ["optim.lr=0.25"]
    assert cluster.printed == [
        f"trial 1 {status}: Slurm job 7_1 ended without a result ({state}); its log: {Path(LOG).absolute()}"
    ]
    assert cluster(TRIALS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_a_job_requeued_by_slurm_resumes_after_its_signal(cluster: Cluster) -> None:
    """It saved, and submitit took it for ended; the signal does not end the other job."""
    (cluster.folder / "twice_7_0").touch()
    assert cluster(TRIALS, "trainer.seed=2", f"trainer.project_name={SIGNALLED}") == 143
    assert cluster.ended() == [["0", "finished"], ["1", "interrupted"]]
    assert Path("x/0", STARTS).read_text().split() == ["3360", "3360"]


@pytest.mark.soak
def test_a_job_starts_while_submitit_moves_its_script(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit renames the script passed to sbatch and then links the old name to it: in between the file does not exist."""
    monkeypatch.setattr(Path, "symlink_to", lambda link, target: time.sleep(1.0))
    assert cluster(TRIALS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_an_unreachable_slurm_controller_ends_no_job(cluster: Cluster) -> None:
    (cluster.folder / "down").touch()
    assert slurm.queue() is None
    assert cluster(TRIALS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_a_failed_trial_is_reported_with_its_log(cluster: Cluster) -> None:
    assert cluster(TRIALS) == 0 and cluster.printed == []
    Path("x/1/config.yaml").write_text("trainer: {seed: 77}")
    assert cluster(TRIALS) == 2 and cluster.ended() == [["0", "finished"], ["1", "failed"]]
    assert cluster.printed == [f"trial 1 failed, exit code 2; its log: {Path(LOG.replace('7_1', '8_1')).absolute()}"]


def test_a_sweep_with_jobs_of_an_earlier_start_in_the_queue_is_refused(cluster: Cluster) -> None:
    """Only jobs of this sweep without a result count."""
    for job in ("5_0", "5_1", "5_2"):
        folder = Path("x/.submitit", job)
        folder.mkdir(parents=True)
        (folder / f"{job}_submitted.pkl").touch()
    for job in ("5_0", "5_2", "6_0"):  # 6_0 is another sweep's
        (cluster.folder / f"job_{job}").touch()
    (cluster.folder / "ended_5_2").write_text("COMPLETED")
    assert cluster(TRIALS) == 2 and not (cluster.folder / "batch_7.sh").exists()
    assert cluster.printed == [
        "error: x: jobs of an earlier start are still in Slurm's queue; wait for them, or cancel them: scancel 5_0"
    ]
    (cluster.folder / "job_5_0").unlink()
    assert cluster(TRIALS) == 0
    (cluster.folder / "job_5_1").touch()  # a job stays in the queue for a while after its trial has ended
    shutil.copy("x/.submitit/7_0/7_0_0_result.pkl", "x/.submitit/5_1/5_1_0_result.pkl")
    assert cluster(TRIALS) == 0 and (cluster.folder / "batch_8.sh").exists()


def test_an_error_of_sbatch_is_one_line(cluster: Cluster) -> None:
    assert cluster(TRIALS, "hydra.launcher.partition=none") == 2
    assert [line for line in cluster.printed if line.startswith("error")] == [
        "error: hydra/launcher=submitit_slurm: sbatch: error: invalid partition specified: none"
    ]


def test_a_job_too_short_to_save_is_refused_before_submission(cluster: Cluster) -> None:
    assert slurm_walltime(timeout_min=5, signal_delay_s=90) == "90"
    with pytest.raises(ConfigError, match=r"^hydra.launcher.timeout_min=4: too short: 120 s .* and 120 s are reserved"):
        slurm_walltime(timeout_min=4, signal_delay_s=120)
    assert cluster(TRIALS, "hydra.launcher.timeout_min=4") == 2 and cluster.printed[0].startswith(
        "error: hydra.launcher.timeout_min=4:"
    )
    assert not (cluster.folder / "batch_7.sh").exists()
    assert cluster(TRIALS, "hydra.launcher.timeout_min=4", "trainer.walltime=60") == 0, "an explicit walltime is not checked"


def test_ctrl_c_stops_only_the_waiting(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(jobs: Any) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "wait", interrupted)
    assert cluster(TRIALS) == 130
    assert cluster.printed == ["interrupted; the jobs keep running; to cancel them: scancel 7_0 7_1"]


@pytest.mark.parametrize(
    ("looks", "last"),
    [
        ([{"7": "RUNNING"}, None, {}, None, {}], FORGOTTEN),
        ([{"7": "NODE_FAIL"}, {"7": "PENDING"}, {"7": "CANCELLED"}, {"7": "CANCELLED"}], "CANCELLED"),
        ([{}, {}, {"7": "PENDING"}, {"7": "TIMEOUT"}, {"7": "TIMEOUT"}], "TIMEOUT"),
    ],
)
def test_a_job_has_ended_if_two_polls_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, str] | None], last: str
) -> None:
    left = iter(looks)
    monkeypatch.setattr(slurm, "queue", lambda: next(left))
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.0)
    job: SlurmJob[Any] = SlurmJob(tmp_path / "%j", "7")
    assert slurm.wait([job]) == {"7": last} and next(left, "no poll left") == "no poll left"


@pytest.mark.parametrize(("state", "value"), [("CANCELLED", INTERRUPTED), (FORGOTTEN, None), ("FAILED", None)])
def test_result_of_a_job_without_a_result_file_follows_its_state(tmp_path: Path, state: str, value: str | None) -> None:
    """A search resumes an interrupted trial and does not repeat a failed one."""
    job: SlurmJob[Any] = SlurmJob(tmp_path / "%j", "7")
    assert slurm.returned(Point(3, ("a=1",), tmp_path), job, state).return_value == value
    (result,) = read_results(tmp_path)
    assert (result.number, list(result.overrides), result.objective) == (3, ["a=1"], None)
