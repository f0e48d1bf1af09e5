"""Slurm launcher of sweeps (hydra/launcher=submitit_slurm): time limits of trials, and results of jobs that Slurm ended."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from configs.base.keys import ConfigError
from configs.sweeps.sweep_points import INTERRUPTED, Point, Result, Status, read_results, swept, write_result

if TYPE_CHECKING:
    from submitit import Job

END_SECONDS = 120  # reserved before Slurm's signal, which may come a minute early, to save and end all processes
LOOK_SECONDS = 30  # interval between queries of Slurm's queue
STOPPED = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
"""States of a job that was ended by Slurm."""
OVER = STOPPED | {"COMPLETED", "FAILED"}
FORGOTTEN = "over"  # state of a job that ended so long ago that Slurm's controller no longer lists it
KILLED = 128 + 9  # exit code of a process ended by SIGKILL


def slurm_walltime(timeout_min: int, signal_delay_s: int) -> str:
    """trainer.walltime of a submitit job on Slurm, from the launcher's keys. Raises ConfigError if no time is left.

    The run must end before Slurm's signal: the signal reaches all processes of the job, and would end Ray's before the run saved.
    """
    seconds = timeout_min * 60 - signal_delay_s - END_SECONDS
    if seconds <= 0:
        raise ConfigError(
            f"hydra.launcher.timeout_min={timeout_min}: too short: {signal_delay_s} s (hydra.launcher.signal_delay_s) "
            f"and {END_SECONDS} s are reserved for saving; increase it"
        )
    return str(seconds)


class SlurmLauncher(Launcher):
    """Launcher with the submission of hydra-submitit-launcher, but with its own way of waiting for jobs.

    The packaged launcher raises at the first job without a result, and waits forever for a cancelled job if Slurm has no
    accounting. This one queries Slurm's queue, waits for all jobs, and reports how each of them ended.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in settings.items()
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Prepare the launcher. Raises ConfigError if jobs would be too short, before they wait in the queue for hours."""
        from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as Packaged

        # submitit pickles this object and calls it in the job; its own launch method is not used.
        self.point = Packaged(**self.settings)
        self.point.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.sweep_dir = Path(config.hydra.sweep.dir)
        self.typed = list(config.hydra.overrides.task)
        if config.trainer.get("walltime", "") is None:
            slurm_walltime(self.settings["timeout_min"], self.settings["signal_delay_s"])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the jobs and wait for them.

        Raises ConfigError if jobs of an earlier start are still queued or running: two runs would write into one directory.
        """
        folder = Path(self.settings["submitit_folder"])
        if still := in_queue(folder):
            raise ConfigError(
                f"{self.sweep_dir}: jobs of an earlier start are still in Slurm's queue; wait for them, or cancel them: "
                f"scancel {' '.join(still)}"
            )
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        jobs = self.submit(folder, [list(words) for words in job_overrides], numbers)
        ids = " ".join(job.job_id for job in jobs)
        print(f"trials {numbers[0]} to {numbers[-1]}: Slurm jobs {ids}", file=sys.stderr)
        try:
            states = wait(jobs)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"the jobs keep running; to cancel them: scancel {ids}") from interrupt
        points = [
            Point(number, swept(self.typed, words), self.sweep_dir) for number, words in zip(numbers, job_overrides, strict=True)
        ]
        return [returned(point, job, states.get(job.job_id, FORGOTTEN)) for point, job in zip(points, jobs, strict=True)]

    def submit(self, folder: Path, words: list[list[str]], numbers: range) -> "list[Job[JobReturn]]":
        """Submit a job array. Raises ConfigError if Slurm refuses it."""
        from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        shared = {field.name for field in fields(BaseQueueConf)}
        asked = {key if key in shared else f"slurm_{key}": value for key, value in self.settings.items()}
        del asked["submitit_folder"]
        # Since Slurm 22.05 srun no longer inherits --cpus-per-task from the job.
        if (cpus := asked["cpus_per_task"]) is not None:
            asked["slurm_srun_args"] = [f"--cpus-per-task={cpus}"]
        executor = AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=asked.pop("slurm_max_num_timeout"))
        executor.update_parameters(**asked)
        self.sweep_dir.mkdir(parents=True, exist_ok=True)
        names, state = [f"job_id_for_{number}" for number in numbers], [Singleton.get_state()] * len(words)
        try:
            return executor.map_array(self.point, words, ["hydra.sweep.dir"] * len(words), numbers, names, state)
        except (FailedJobError, FailedSubmissionError) as error:  # contains the message of sbatch
            raise ConfigError(f"hydra/launcher=submitit_slurm: {' '.join(str(error).split())}") from error


def queue() -> dict[str, str] | None:
    """{job id: state} of this user's jobs; finished jobs are listed for some minutes. None if Slurm does not respond."""
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    return dict(line.strip().split("|") for line in done.stdout.splitlines())


def in_queue(folder: Path) -> list[str]:
    """Ids of jobs submitted with ``folder`` (which contains %j) that are running or pending."""
    from submitit import SlurmJob

    states = queue() or {}
    ids = [job_id for job_id, state in states.items() if state not in OVER]
    jobs: list[Job[JobReturn]] = [SlurmJob(folder, job_id) for job_id in ids]
    return [job.job_id for job in jobs if job.paths.submitted_pickle.exists() and not has_ended(job)]


def has_ended(job: "Job[JobReturn]") -> bool:
    """Whether the job has a final result. An interrupted job does not count, because Slurm may requeue it."""
    from submitit.core.utils import UncompletedJobError

    if not job.paths.result_pickle.exists():
        return False
    try:
        result = job.results()[0]
    except UncompletedJobError:
        return True
    return result.status == JobStatus.FAILED or result.return_value != INTERRUPTED


def wait(jobs: "Sequence[Job[JobReturn]]") -> dict[str, str]:
    """Wait for all jobs; returns their last states.

    A job is finished if it has a final result, or if two consecutive queries of the queue report its end: result files written on
    another node may become visible late.
    """
    states: dict[str, str] = {}
    over: set[str] = set()
    left = list(jobs)
    while left:
        seen = queue()
        if seen is not None:
            for job in left:
                if job.job_id in seen:
                    states[job.job_id] = seen[job.job_id]
                # Absent from the queue: finished, unless the job was submitted so recently that it is not listed yet.
                elif job.job_id in states or job.paths.result_pickle.exists():
                    states[job.job_id] = FORGOTTEN
            over_before, over = over, {job.job_id for job in left if states.get(job.job_id) in OVER | {FORGOTTEN}}
            left = [job for job in left if job.job_id not in over_before & over]
        until = time.monotonic() + LOOK_SECONDS
        while (left := [job for job in left if not has_ended(job)]) and time.monotonic() < until:
            time.sleep(min(1.0, LOOK_SECONDS))
    return states


def returned(point: Point, job: "Job[JobReturn]", state: str) -> JobReturn:
    """Return value for the sweeper of a finished job; prints a line unless the trial succeeded."""
    from submitit.core.utils import UncompletedJobError

    log = f"its log: {job.paths.stderr}"
    if job.paths.result_pickle.exists():
        try:
            result = job.results()[0]
        except UncompletedJobError:
            state = "FAILED"
        else:
            for known in read_results(point.sweep_dir):
                if known.number == point.number and known.code != 0:
                    print(f"trial {point.number} {known.status}, exit code {known.code}; {log}", file=sys.stderr)
            return result
    # No result at all: Slurm ended the process, so write the trial's result on its behalf.
    status: Status = "interrupted" if state in STOPPED else "failed"
    write_result(point, Result(point.number, point.overrides, status, KILLED if state in STOPPED else 1, None, 0.0))
    print(f"trial {point.number} {status}: Slurm job {job.job_id} ended without a result ({state}); {log}", file=sys.stderr)
    ended = JobReturn(status=JobStatus.COMPLETED)
    ended.return_value = INTERRUPTED if status == "interrupted" else None
    return ended
