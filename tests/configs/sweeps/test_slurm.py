"""hydra/launcher=submitit_slurm with stand-ins for Slurm's programs; submitit is real. On a real Slurm: docs/evidence.md."""

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
    """Sweeps of two points, of the jobs 7_0 and 7_1, and started again 8_0 and 8_1."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.rows: list[list[str]] = []
        self.printed: list[str] = []
        self._capsys = capsys

    def __call__(self, *words: str) -> int:
        """The exit code."""
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


POINTS = "optim.lr=0.5,0.25"


def test_points_end_in_time_and_go_on(cluster: Cluster) -> None:
    """Two points that need three and nine starts: one start each, then as many as submitit may begin again."""
    asked = ("trainer.seed=3,9", "optim.lr=0.5", "hydra.launcher.cpus_per_task=6")
    assert cluster(*asked, "trainer.walltime=77") == 0 and cluster.ended() == [["0", "interrupted"], ["1", "interrupted"]]
    assert not (cluster.folder / "scontrol_calls").exists(), "the same command goes on, unless more is asked for"
    assert cluster(*asked, "hydra.launcher.timeout_min=10", "hydra.launcher.max_num_timeout=1") == 0
    assert [row[:3] for row in cluster.rows] == [["0", "finished", "-0.5"], ["1", "interrupted", "-"]]
    assert sorted((cluster.folder / "scontrol_calls").read_text().splitlines()) == ["requeue 8_0", "requeue 8_1"]
    for point in "01":
        assert Path("x", point, STARTS).read_text().split() == ["77", "360", "360"]
    script = (cluster.folder / "batch_8.sh").read_text().splitlines()
    assert {line for line in script if line.startswith("#SBATCH")} >= {
        "#SBATCH --array=0-1%2", "#SBATCH --partition=gpu", "#SBATCH --time=10", "#SBATCH --gpus-per-node=8", "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --signal=USR2@120", "#SBATCH --cpus-per-task=6", "#SBATCH --job-name=tandem",
    }  # fmt: skip
    (step,) = [line for line in script if line.startswith("srun ")]
    assert "--cpus-per-task=6" in step.split(), "a step does not get the job's by itself"


@pytest.mark.parametrize(("state", "status", "code"), [("CANCELLED", "interrupted", 137), ("FAILED", "failed", 1)])
def test_a_job_that_slurm_ends_is_a_row_and_the_others_are_waited_for(
    cluster: Cluster, state: str, status: str, code: int
) -> None:
    (cluster.folder / "over_7_1").write_text(state)
    assert cluster(POINTS) == code
    assert cluster.ended() == [["0", "finished"], ["1", status]] and cluster.rows[1][4:] == ["optim.lr=0.25"]
    assert cluster.printed == [
        f"trial 1 {status}: Slurm job 7_1 ended without a result ({state}); its log: {Path(LOG).absolute()}"
    ]
    assert cluster(POINTS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_a_job_that_slurm_puts_back_goes_on_after_its_signal(cluster: Cluster) -> None:
    """It saved, and was over for submitit; nor do the others end for a signal that was not theirs."""
    (cluster.folder / "twice_7_0").touch()
    assert cluster(POINTS, "trainer.seed=2", f"trainer.project_name={SIGNALLED}") == 143
    assert cluster.ended() == [["0", "finished"], ["1", "interrupted"]]
    assert Path("x/0", STARTS).read_text().split() == ["3360", "3360"]


def test_a_job_begins_while_submitit_moves_its_script(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit renames the script that sbatch was given and links the old name to it: between the two there is no such file."""
    monkeypatch.setattr(Path, "symlink_to", lambda link, target: time.sleep(1.0))
    assert cluster(POINTS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_a_controller_that_does_not_answer_ends_no_job(cluster: Cluster) -> None:
    (cluster.folder / "down").touch()
    assert slurm.queue() is None
    assert cluster(POINTS) == 0 and cluster.ended() == [["0", "finished"], ["1", "finished"]]


def test_a_point_that_fails_says_where_its_log_is(cluster: Cluster) -> None:
    assert cluster(POINTS) == 0 and cluster.printed == []
    Path("x/1/config.yaml").write_text("trainer: {seed: 77}")
    assert cluster(POINTS) == 2 and cluster.ended() == [["0", "finished"], ["1", "failed"]]
    assert cluster.printed == [f"trial 1 failed, exit code 2; its log: {Path(LOG.replace('7_1', '8_1')).absolute()}"]


def test_two_starts_do_not_share_a_directory(cluster: Cluster) -> None:
    """Those of an earlier start that have no result yet, and are in the queue."""
    for job in ("5_0", "5_1", "5_2"):
        folder = Path("x/.submitit", job)
        folder.mkdir(parents=True)
        (folder / f"{job}_submitted.pkl").touch()
    for job in ("5_0", "5_2", "6_0"):  # 6_0 is another sweep's
        (cluster.folder / f"job_{job}").touch()
    (cluster.folder / "ended_5_2").write_text("COMPLETED")
    assert cluster(POINTS) == 2 and not (cluster.folder / "batch_7.sh").exists()
    assert cluster.printed == [
        "error: x: jobs of an earlier start are still in Slurm's queue; wait for them, or cancel them: scancel 5_0"
    ]
    (cluster.folder / "job_5_0").unlink()
    assert cluster(POINTS) == 0
    (cluster.folder / "job_5_1").touch()  # a job is in the queue for a while when its point is over
    shutil.copy("x/.submitit/7_0/7_0_0_result.pkl", "x/.submitit/5_1/5_1_0_result.pkl")
    assert cluster(POINTS) == 0 and (cluster.folder / "batch_8.sh").exists()


def test_what_slurm_refuses_is_one_line(cluster: Cluster) -> None:
    assert cluster(POINTS, "hydra.launcher.partition=none") == 2
    assert [line for line in cluster.printed if line.startswith("error")] == [
        "error: hydra/launcher=submitit_slurm: sbatch: error: invalid partition specified: none"
    ]


def test_a_job_too_short_for_its_own_end_is_one_line_before_it_waits(cluster: Cluster) -> None:
    assert slurm_walltime(timeout_min=5, signal_delay_s=90) == "90"
    with pytest.raises(ConfigError, match=r"^hydra.launcher.timeout_min=4: too short: 120 s .* and 120 s are reserved"):
        slurm_walltime(timeout_min=4, signal_delay_s=120)
    assert cluster(POINTS, "hydra.launcher.timeout_min=4") == 2 and cluster.printed[0].startswith(
        "error: hydra.launcher.timeout_min=4:"
    )
    assert not (cluster.folder / "batch_7.sh").exists()
    assert cluster(POINTS, "hydra.launcher.timeout_min=4", "trainer.walltime=60") == 0, "its own walltime is the user's business"


def test_ctrl_c_ends_the_waiting_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(jobs: Any) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "wait", interrupted)
    assert cluster(POINTS) == 130
    assert cluster.printed == ["interrupted; the jobs keep running; to cancel them: scancel 7_0 7_1"]


@pytest.mark.parametrize(
    ("looks", "last"),
    [
        ([{"7": "RUNNING"}, None, {}, None, {}], FORGOTTEN),
        ([{"7": "NODE_FAIL"}, {"7": "PENDING"}, {"7": "CANCELLED"}, {"7": "CANCELLED"}], "CANCELLED"),
        ([{}, {}, {"7": "PENDING"}, {"7": "TIMEOUT"}, {"7": "TIMEOUT"}], "TIMEOUT"),
    ],
)
def test_a_job_is_over_at_the_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, str] | None], last: str
) -> None:
    left = iter(looks)
    monkeypatch.setattr(slurm, "queue", lambda: next(left))
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.0)
    job: SlurmJob[Any] = SlurmJob(tmp_path / "%j", "7")
    assert slurm.wait([job]) == {"7": last} and next(left, "no look left") == "no look left"


@pytest.mark.parametrize(("state", "value"), [("CANCELLED", INTERRUPTED), (FORGOTTEN, None), ("FAILED", None)])
def test_what_a_search_is_told_of_a_job_without_a_result(tmp_path: Path, state: str, value: str | None) -> None:
    """It goes on with a trial that was interrupted, and gives up one that failed."""
    job: SlurmJob[Any] = SlurmJob(tmp_path / "%j", "7")
    assert slurm.returned(Point(3, ("a=1",), tmp_path), job, state).return_value == value
    (result,) = read_results(tmp_path)
    assert (result.number, list(result.overrides), result.objective) == (3, ["a=1"], None)
