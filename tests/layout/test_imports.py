"""Imports go one way, trainer -> workers -> configs, and heavy packages are loaded late."""

import subprocess
import sys

import pytest

from tests.layout.source import ROOT, imports, python_files, top_level

ENTRY_POINTS = [path for path in python_files("trainer") if path.match("trainer/main_*.py")]
HEAVY = {"torch", "ray", "transformers", "tokenizers", "pyarrow", "tensorboard", "matplotlib"}


def importers(names: set[str], *trees: str) -> dict[str, list[str]]:
    """{file: [line: name]} of the imports of top-level ``names`` under ``trees``."""
    found: dict[str, list[str]] = {}
    for path in python_files(*trees):
        for line, name in imports(path):
            if top_level(name) in names:
                found.setdefault(str(path), []).append(f"{line}: {name}")
    return found


@pytest.mark.parametrize(
    ("tree", "foreign"),
    [
        ("configs", {"workers", "trainer", "data_preprocess", "tests"} | HEAVY),
        ("workers", {"trainer", "data_preprocess", "tests", "hydra", "omegaconf"}),
        ("trainer", {"data_preprocess", "tests"}),
        ("data_preprocess", {"ray", "hydra", "omegaconf", "tests"}),
        ("trainer/algorithms", {"ray", "hydra", "omegaconf", "transformers"}),
    ],
)
def test_imports_go_one_way(tree: str, foreign: set[str]) -> None:
    assert importers(foreign, tree) == {}


def test_only_the_backend_and_entry_points_import_ray() -> None:
    allowed = {"workers/controller/ray/ray_backend.py", "workers/controller/ray/ray_places.py", *map(str, ENTRY_POINTS)}
    assert importers({"ray"}).keys() <= allowed


def test_untyped_configuration_stays_in_configs() -> None:
    """configs/load.py returns frozen dataclasses; no DictConfig leaves configs."""
    assert all(path.startswith("configs/") for path in importers({"omegaconf", "hydra"}))


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in sys.modules after ``statement`` in a fresh interpreter."""
    command = [sys.executable, "-c", f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())


def import_all(tree: str) -> str:
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in python_files(tree)]
    return "import " + ", ".join(names)


def test_algorithms_load_neither_ray_nor_hydra() -> None:
    assert not loaded_by("import trainer\n" + import_all("trainer/algorithms")) & {"ray", "hydra", "omegaconf"}


def test_configs_load_nothing_heavy() -> None:
    assert not loaded_by(import_all("configs")) & HEAVY


def test_entry_points_load_nothing_heavy_before_the_configuration_is_checked() -> None:
    assert ENTRY_POINTS
    names = ", ".join(".".join(path.with_suffix("").parts) for path in ENTRY_POINTS)
    assert not loaded_by(f"import {names}") & HEAVY


def test_peft_is_not_loaded_without_an_adapter() -> None:
    programs = "import trainer.ppo.ppo_builder, trainer.supervised.supervised_builder, trainer.generation.generate"
    programs += ", trainer.checkpoint.export"
    assert "peft" not in loaded_by(
        f"{programs}, workers.roles.worker, workers.engine.fsdp.fsdp_engine, workers.rollout.embedded.embedded_engine"
    )
