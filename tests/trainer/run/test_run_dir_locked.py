"""A second program does not start in a directory that another one writes to."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from configs.base.locks import LOCK, locked
from configs.sweeps.sweep_points import SWEEP_LOCK
from tests.runs import make_task, metrics_of, ppo_arguments
from tests.trainer.points import PROGRAM
from trainer import main_dpo, main_export, main_generation, main_parity, main_ppo, main_reward_model, main_sft
from trainer.cli.api import Callback, run_ppo

IN_USE = "in use by process "


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=16, test_size=8, sft_size=16)


def test_second_start_does_not_touch_a_running_run(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would remove the checkpoint that the first one is writing, and move its metrics."""
    run_dir = tmp_path / "run"
    words = ppo_arguments(task, run_dir)
    half = run_dir / "global_step_9.incomplete"

    class Again(Callback):
        def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
            half.mkdir(exist_ok=True)
            assert main_ppo.PROGRAM(words) == 2

    run_ppo(words, [Again()])
    assert half.exists() and len(metrics_of(run_dir)) == 2 and not list(run_dir.glob("earlier_*"))
    reported = [line for line in capsys.readouterr().err.splitlines() if IN_USE in line]
    assert len(reported) == 2 and reported[0].startswith(f"error: trainer.default_local_dir={run_dir}: {IN_USE}")
    assert main_ppo.PROGRAM(words) == 0, "the first run has ended"


def test_no_program_writes_to_a_directory_in_use(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["trainer.device=cpu", "trainer.backend=local", "trainer.n_gpus_per_node=1"]
    model, sft = f"model.path={task}/base", f"data.train_files={task}/sft.parquet"
    pairs = f"data.train_files={task}/preferences.parquet"
    engine = [f"actor_rollout_ref.model.path={task}/base", "actor_rollout_ref.rollout.dtype=float32"]
    lengths = ["data.max_prompt_length=8", "data.max_response_length=8"]
    starts = {
        main_sft: ["recipe=sort_digits", model, sft, "data.val_files=[]", "trainer.test_freq=-1"],
        main_reward_model: ["recipe=sort_digits", model, pairs, "data.val_files=[]", "trainer.test_freq=-1"],
        main_dpo: ["recipe=sort_digits", model, pairs, "data.val_files=[]", "trainer.test_freq=-1"],
        main_generation: [f"data.path={task}/test.parquet", *engine, *lengths],
        main_parity: [f"model={task}/base", f"data.files={task}/test.parquet", "engines=[embedded]", *lengths],
    }
    for program, words in starts.items():
        name = program.__name__.rpartition(".")[2]
        run_dir = tmp_path / name
        directory = run_dir / "answers" if program is main_generation else run_dir
        key = "data.output_path" if program is main_generation else "trainer.default_local_dir"
        with locked(directory, key):
            assert program.PROGRAM([*words, *here, f"trainer.default_local_dir={run_dir}"]) == 2, name
        assert f"error: {key}={directory}: {IN_USE}" in capsys.readouterr().err, name
        assert [path.name for path in directory.iterdir()] == [LOCK], name


def test_second_export_does_not_touch_the_first(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of a killed export are no obstacle, and not part of the result."""
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", "trainer.total_training_steps=1", "trainer.save_freq=1")) == 0
    words = [f"checkpoint={tmp_path}/run", f"output={tmp_path}/model"]
    half = tmp_path / "model.incomplete"
    with locked(half, "output"):
        (half / "model.safetensors").write_text("of the first")
        assert main_export.PROGRAM(words) == 2
    assert (half / "model.safetensors").exists() and f"error: output={half}: {IN_USE}" in capsys.readouterr().err
    (half / "old").mkdir()
    assert main_export.PROGRAM(words) == 0 and not half.exists()
    assert not {LOCK, "old"} & {path.name for path in (tmp_path / "model").iterdir()}


def test_second_sweep_does_not_touch_the_results_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "trainer.default_local_dir=x", "optim.lr=0.5,0.25"]
    assert PROGRAM(words) == 0
    starts = Path("x/0/starts").read_text()
    with locked(Path("x"), "trainer.default_local_dir", SWEEP_LOCK):
        assert PROGRAM(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: trainer.default_local_dir=x: {IN_USE}")
    assert sorted(path.name for path in Path("x/points").iterdir()) == ["0.json", "1.json"]
    assert Path("x/0/starts").read_text() == starts
    assert PROGRAM(words) == 0, "the first sweep has ended"
