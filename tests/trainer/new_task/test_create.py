"""Folders of new tasks: complete, valid on every machine, written once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import main_dpo, main_ppo, main_reward_model, main_sft
from trainer.new_task.create import TEMPLATES, create
from trainer.new_task.sizes import GB, LocalMachine

MACHINES = {
    "cpu": LocalMachine(),
    "gpu": LocalMachine(1, 24 * GB, has_bfloat16=True),
    "gpus": LocalMachine(8, 80 * GB, has_bfloat16=True),
}
PROGRAMS = {"train": main_ppo, "warm_start": main_sft, "reward_model": main_reward_model, "dpo": main_dpo}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_recipe_of_a_folder_is_valid(template: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = create(tmp_path / "my_task", template, MACHINES[machine])
    monkeypatch.chdir(tmp_path / "my_task")
    recipes = [file.stem for file in files if file.suffix == ".yaml"]
    assert "train" in recipes
    for recipe in recipes:
        assert PROGRAMS[recipe].PROGRAM(["--config-dir=.", f"--config-name={recipe}", "trainer.dry_run=config"]) == 0


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_files_are_those_of_its_readme(template: str, tmp_path: Path) -> None:
    cpu, gpu = ({file.name for file in create(tmp_path / kind, template, MACHINES[kind])} for kind in ("cpu", "gpu"))
    assert {"README.md", "task.py", "test_task.py", "train.yaml"} <= gpu < cpu or gpu == cpu
    for kind, names in (("cpu", cpu), ("gpu", gpu)):
        readme = (tmp_path / kind / "README.md").read_text()
        assert len([line for line in readme.splitlines() if line]) <= 10 and "$" not in readme
        assert {name for name in names if name.endswith(".yaml")} == {
            f"{line.split('--config-name ')[1].split()[0]}.yaml" for line in readme.splitlines() if "--config-name" in line
        }


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tests_of_a_folder_pass_as_written(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "my_task"
    create(folder, template, MACHINES["cpu"])
    subprocess.run([sys.executable, "-m", "unittest", "-q"], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("name", ["my task", "3d", "-x", "a.b", ".."])
def test_a_bad_name_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a task's name has letters"):
        create(tmp_path / name, "own", MACHINES["cpu"])
    assert [*tmp_path.iterdir()] == []


def test_nothing_that_exists_is_changed(tmp_path: Path) -> None:
    folder = tmp_path / "my_task"
    folder.mkdir()
    with pytest.raises(ValueError, match="my_task exists already, and nothing in it was changed"):
        create(folder, "own", MACHINES["cpu"])
    assert [*folder.iterdir()] == []
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"there is no directory .*missing to write it into"):
        create(tmp_path / "missing" / "my_task", "own", MACHINES["cpu"])
