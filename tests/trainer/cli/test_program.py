"""Behaviour shared by every main_*.py: exit codes, one-line errors, notes; and the guard of the package."""

import errno
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from configs.argv import groups_of, shown
from configs.base.keys import CONFIG_DIR, described
from configs.schema.supervised import SFTConfig
from tests.broken import PROGRAMS
from trainer.cli.program import Program
from trainer.run.errors import CheckFailed, NotSaved, Stopped
from trainer.run.run_dir import GLOBAL_STEP, LATEST, METRICS, json_line, write_config
from trainer.run.run_status import MARK, record_export, write_outcome
from workers.controller.group import PhaseTimeout, WorkerError

ROOT = CONFIG_DIR.parent


def program(run: Any = lambda config, output: None, check: Any = lambda config, typed: []) -> Program[SFTConfig]:
    return Program(
        name="trainer.main_sft",
        about="About.",
        root="sft_trainer",
        schema=SFTConfig,
        often_used=("data.train_files", "optim.lr"),
        examples=("optim.lr=1e-4",),
        check=check,
        run=run,
    )


def raising(error: BaseException) -> Program[SFTConfig]:
    def run(config: SFTConfig, output: list[str]) -> None:
        raise error

    return program(run)


def test_run_receives_the_configuration_and_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    main = program(lambda config, output: seen.append((config, output)), lambda config, typed: [f"typed {sorted(typed)}"])
    assert main(["optim.lr=1", "use_remove_padding=True"]) == 0
    ((config, output),) = seen
    assert isinstance(config, SFTConfig) and config.optim.lr == 1.0
    assert output == ["use_remove_padding is left out: no batch is ever padded", "typed ['optim.lr']"]
    assert capsys.readouterr().err.splitlines() == [f"note: {line}" for line in output]


def test_finished_run_is_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def run(config: SFTConfig, output: list[str]) -> None:
        seen.append(config.trainer.resume_mode)
        write_config(tmp_path, asdict(config))
        (tmp_path / METRICS).write_text(json_line({GLOBAL_STEP: 7}))
        (tmp_path / "global_step_7").mkdir(exist_ok=True)
        (tmp_path / LATEST).write_text("7")
        write_outcome(tmp_path, "finished", 1.0)

    exported = tmp_path / "exported"
    main = program(run)
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]", f"trainer.export_dir={exported}"]
    assert main(words) == main(words) == 0 and seen == ["auto", "auto"], "the export that it shall write is missing"
    exported.mkdir()
    seen.clear()
    assert main(words) == 0 and seen.pop() == "auto", "an empty directory is no model"
    (exported / "config.json").write_text("{}")
    record_export(tmp_path, None)
    assert main(words) == 0 and seen.pop() == "auto", "a model of another run is there"
    record_export(tmp_path, str(exported))
    (exported / MARK).write_text("another run's")
    assert main(words) == 0 and seen.pop() == "auto", "another run has exported there since"
    record_export(tmp_path, str(exported))
    seen.clear()
    assert main(words) == 0 and seen == []
    assert capsys.readouterr().out.startswith(f"the run in {tmp_path} ended with step 7: nothing is left to do; ")
    assert main([*words, "trainer.resume_mode=disable"]) == 0 and seen == ["disable"]
    assert main([*words, "trainer.total_epochs=9"]) == 0 and seen == ["disable", "auto"]


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(OSError(errno.ENOSPC, "No space left on device", "x/config.yaml.partial"))([]) == 1
    assert capsys.readouterr().err == (
        "error: x/config.yaml.partial: No space left on device; make room there, or name another directory\n"
    )
    assert raising(OSError(errno.EIO, "Input/output error"))([]) == 1 and "Traceback" in capsys.readouterr().err


def test_failed_checks_of_a_run_are_a_line_each_and_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(CheckFailed("one\ntwo"))([]) == 3
    assert capsys.readouterr().err.splitlines() == ["error: one", "error: two"]


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["optim.lrr=1"], ["error: optim.lrr: there is no such key; did you mean optim.lr?"]),
        (["optim.lr=x"], ['error: optim.lr="x": must be a valid number']),
        (["recipe=quickstart"], None),
        (["--multrun"], ["error: --multrun: unknown flag; did you mean --multirun?"]),
    ],
)
def test_invalid_argument_is_one_line_and_exit_code_2(
    argv: list[str], lines: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program()(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "HYDRA_FULL_ERROR" not in err
    assert err.splitlines() == lines if lines is not None else len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [ValueError("two\n  lines"), FileNotFoundError("two lines")])
def test_user_error_is_one_line_and_exit_code_2(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(error)([]) == 2
    assert capsys.readouterr().err == "error: two lines (trainer.full_traceback=true shows where)\n"
    assert raising(error)(["trainer.full_traceback=true"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["trainer.full_traceback=true"]])
def test_error_contains_no_secret(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ValueError("no answer from https://me:s3cret@host/v1"))(words) == 2
    err = capsys.readouterr().err
    assert "s3cret" not in err and "no answer from https://" in err and ("Traceback" in err) == bool(words)


def test_traceback_is_shown_if_the_users_configuration_requests_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [sft_trainer, _self_]\ntrainer: {full_traceback: true}\n")

    def check(config: SFTConfig, typed: Any) -> list[str]:
        raise ValueError("a contradiction")

    assert program(check=check)([f"--config-dir={tmp_path}", "--config-name=own"]) == 2
    assert "Traceback" in (err := capsys.readouterr().err) and err.endswith("\nerror: a contradiction\n")


def test_unexpected_error_is_a_traceback_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(RuntimeError("broken"))([]) == 1
    assert "Traceback" in (err := capsys.readouterr().err) and "RuntimeError: broken" in err


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(1, "generation (rollout engine vllm)", "process 7 died", "last lines of x.log:\nlast words"),
        PhaseTimeout("generation", [0, 1], 3.0, "last lines of x.log:\nlast words"),
        NotSaved("the last checkpoint could not be written"),
    ],
)
def test_error_that_names_its_location_has_no_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(error)([]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"
    assert raising(error)(["trainer.full_traceback=true"]) == 1
    assert "Traceback" in (err := capsys.readouterr().err) and err.endswith(f"error: {error}\n")


def test_error_of_the_configuration_in_a_worker_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = WorkerError(0, "engine start", "ConfigError: rollout.name=vllm: no heads of 24", "Traceback ...")
    assert raising(error)([]) == 2
    assert capsys.readouterr().err == "error: rollout.name=vllm: no heads of 24\n"


def test_ctrl_c_exits_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(KeyboardInterrupt())([]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert raising(KeyboardInterrupt("it resumes from here"))([]) == 130
    assert capsys.readouterr().err == "interrupted; it resumes from here\n"


@pytest.mark.parametrize("words", [[], ["trainer.seed=2"]])
def test_command_without_arguments_points_to_help(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["a program", *words])
    with pytest.raises(SystemExit, match="2"):
        raising(ValueError("no data")).main()
    output = f"note: nothing was asked for; python -m {raising(ValueError()).name} --help has examples\n"
    assert capsys.readouterr().err.endswith(output) is (words == [])


@pytest.mark.parametrize("code", [0, 4, 143])
def test_stopped_run_reports_it_in_one_line(capsys: pytest.CaptureFixture[str], code: int) -> None:
    assert raising(Stopped(code, "stopped after step 3"))([]) == code
    assert capsys.readouterr().err == "stopped after step 3\n"


def test_problems_of_a_check_are_reported_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def check(config: SFTConfig, typed: Any) -> list[str]:
        raise ValueError("one\ntwo")

    assert program(raising(AssertionError()).run, check)([]) == 2
    assert capsys.readouterr().err == "error: one\nerror: two\n"


def test_dry_run_checks_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(AssertionError())(["model.path=a", "trainer.dry_run=config", "trainer.n_gpus_per_node=1"]) == 0
    out = capsys.readouterr().out
    assert out == "configuration is fine: 1 worker on cuda, run directory runs/sft\n"


def test_jobs_of_a_sweep_continue_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def run(config: SFTConfig, output: list[str]) -> None:
        seen.append(config.trainer.default_local_dir)
        if config.trainer.seed == 1:
            raise ValueError("the first")

    assert program(run)(["--multirun", "trainer.seed=1,2", "trainer.default_local_dir=x"]) == 2
    assert seen == ["x/0", "x/1"]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_help_fits_one_page(program: Program[Any]) -> None:
    """80 columns and 60 lines: at most ten keys, each with its default and its comment, and every option of every group."""
    page = program.help()
    lines = page.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 60
    assert len(program.often_used) <= 10
    message = described(CONFIG_DIR / f"{program.root}.yaml")
    words = " ".join(page.split())
    assert all(f"{key}={message[key].value}\n" in page and message[key].comment in words for key in program.often_used)
    assert ("\n  none\n" in page) == (not groups_of(program.root))
    for group in groups_of(program.root):
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            (line,) = [line for line in lines if line.startswith(f"  {shown(group)}={path.stem} ")]
            comment = path.read_text().splitlines()[1].removeprefix("# ")
            assert comment and line.endswith(f"  {comment}")
    assert ("trainer.dry_run=full" in page) == (program.plan is not None)


def test_full_dry_run_plans_after_the_files_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    main = replace(raising(AssertionError()), plan=lambda config: called.append(config.trainer.default_local_dir))
    assert main(["trainer.dry_run=full", "trainer.default_local_dir=x"]) == 0 and called == ["x"]
    there = replace(main, inputs=lambda config: ["a: not there", "b: not there"])
    assert there(["trainer.dry_run=full"]) == 2 and called == ["x"]
    assert capsys.readouterr().err == "error: a: not there\nerror: b: not there\n"
    assert there(["trainer.dry_run=config", "model.path=a"]) == 0, "needs no files"
    assert raising(AssertionError())(["trainer.dry_run=full"]) == 2
    assert capsys.readouterr().err.startswith("error: trainer.dry_run=full: trainer.main_sft has no plan to show")


@pytest.mark.parametrize("name", ["workers", "configs"])
@pytest.mark.parametrize("marker", ["__init__.py", None])
def test_guard_names_both_paths(name: str, marker: str | None, tmp_path: Path) -> None:
    """A folder of the user's in the working directory comes first on sys.path, and hides this package."""
    expected = tmp_path / name / marker if marker else tmp_path / f"{name}.py"
    expected.parent.mkdir(exist_ok=True)
    expected.touch()
    result = subprocess.run(
        [sys.executable, "-c", "import trainer"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and str(tmp_path / name) in last and str(ROOT / name) in last


@pytest.mark.parametrize(("code", "jobs"), [(143, ["x/0"]), (4, ["x/0", "x/1"]), (0, ["x/0"])])
def test_a_signal_and_the_end_of_the_walltime_end_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, jobs: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def run(config: SFTConfig, output: list[str]) -> None:
        seen.append(config.trainer.default_local_dir)
        raise Stopped(code, "stopped")

    assert program(run)(["--multirun", "trainer.seed=1,2", "trainer.default_local_dir=x"]) == code
    assert seen == jobs
