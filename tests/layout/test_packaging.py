"""Contents of an installation: one version, every package, every data file, every command."""

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from setuptools import find_namespace_packages
from setuptools.config.expand import read_attr

from tests.layout.source import PACKAGES, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def test_the_version_has_one_home() -> None:
    version = read_attr(SETUPTOOLS["dynamic"]["version"]["attr"], root_dir=ROOT)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    command = [sys.executable, "-c", "import trainer; print(trainer.__version__)"]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() == version


def shipped_files() -> set[Path]:
    """Files of the packages that an installation has, by the rules of pyproject.toml."""
    find = SETUPTOOLS["packages"]["find"]
    folders = [ROOT.joinpath(*name.split(".")) for name in find_namespace_packages(str(ROOT), find["exclude"], find["include"])]
    return {path for folder in folders for pattern in ["*.py", *SETUPTOOLS["package-data"]["*"]] for path in folder.glob(pattern)}


def test_every_file_of_the_packages_is_shipped() -> None:
    trees = (*PACKAGES, "hydra_plugins")  # the latter is a namespace that others share
    files = {path for tree in trees for path in (ROOT / tree).rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == shipped_files()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_folder_of_the_user_does_not_hide_a_package(tmp_path: Path) -> None:
    """Users often have a folder `configs` of YAML files; without __init__.py it must not shadow the package."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    command = [sys.executable, "-c", "import configs, workers; print(configs.__file__, workers.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(ROOT / "configs/__init__.py"), str(ROOT / "workers/__init__.py")]


def test_citation_has_the_current_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = read_attr(SETUPTOOLS["dynamic"]["version"]["attr"], root_dir=ROOT)
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "required by the format"
    assert (citation["version"], citation["license"]) == (version, PYPROJECT["project"]["license"])


@pytest.mark.parametrize("target", PYPROJECT["project"]["scripts"].values())
def test_console_scripts_name_callables(target: str) -> None:
    assert callable(pkgutil.resolve_name(target))


def test_every_program_has_a_console_script() -> None:
    programs = {f"trainer.{path.stem}:main" for path in (ROOT / "trainer").glob("main_*.py")}
    assert programs == set(PYPROJECT["project"]["scripts"].values())
