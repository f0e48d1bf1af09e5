"""Rules for files: their names and contents. test_tree.py has the rules for folders and imports."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.layout.source import PACKAGES, ROOT, parse, python_files, written_files

SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci/run"])

# (file, function) -> why an attribute is accessed by a name that is only known at run time.
PROBING: dict[tuple[str, str], str] = {
    ("workers/rollout/vllm/vllm_scheduler.py", "_next_step"): "names differ between versions of vLLM",
    ("configs/validation/programs.py", "block_problems"): "a walk over the fields of any configuration",
    ("trainer/rewards/sandbox/proxies.py", "_may"): "a program names the attribute that it sets",
    ("trainer/rewards/sandbox/proxies.py", "_encode"): "a named tuple is a tuple whose class has _fields",
    ("workers/batch.py", "concat"): "tokens, rows and objects are checked in the same way",
    ("workers/engine/base.py", "resolve"): "a loss is named by its import path",
    ("workers/rollout/vllm/vllm_weights.py", "held_weights"): "vLLM's models without fused layers do not say so",
}


def lines_matching(pattern: str, paths: tuple[Path, ...]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_entry_points_parse_and_call() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "trainer").glob("main_*.py")}
    assert {name: length for name, length in lengths.items() if length >= 80} == {}


def test_a_helper_has_a_name() -> None:
    nameless = {"utils", "util", "helpers", "helper", "misc", "common_utils"}
    assert [str(path) for path in python_files() if nameless & set(path.with_suffix("").parts)] == []


def test_every_package_is_marked_as_typed() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_tests_mirror_the_tree() -> None:
    """tests/a/b/test_c.py tests a/b; c starts with the name of a file or folder there, or of a helper in tests/a/b. tests/layout
    has the rules."""
    strangers = []
    for path in python_files("tests"):
        inside = path.relative_to("tests")
        if inside.parts[0] == "layout" or not path.name.startswith("test_"):
            continue
        source = ROOT / inside.parent
        subject = path.stem.removeprefix("test_")
        known = [entry.stem for entry in source.iterdir() if entry.name != "__init__.py"] if source.is_dir() else []
        known += [entry.stem for entry in (ROOT / path).parent.glob("*.py") if not entry.name.startswith(("test_", "__"))]
        if not any(subject == name or subject.startswith(f"{name}_") for name in known):
            strangers.append(str(path))
    assert strangers == []


def test_no_path_of_one_machine() -> None:
    """A path in a home directory or mount exists on one machine only."""
    assert lines_matching(r"(?<![\w.~}])/(root|home|opt|mnt|work|workspace|Users)/\w", written_files()) == []


def test_no_package_registry_but_pytorchs_own() -> None:
    """pip's configuration selects the registry. The only exception is the index with CPU builds of torch."""
    addresses = r"https?://[^\s\"']*(pypi|pythonhosted|/simple\b|artifactory|nexus|/whl\b)|-{2}find-links|file:/{3}"
    hits = lines_matching(addresses, written_files())
    assert [hit for hit in hits if "https://download.pytorch.org/whl/cpu" not in hit] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository: an unpacked archive")
def test_no_ignored_file_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout == ""


def test_nothing_is_left_to_do() -> None:
    everything = tuple(path for path in written_files() if path.parts[:2] != ("tests", "layout"))
    assert lines_matching(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError", everything) == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """True if the handler catches everything, and does not raise, use the exception, or print the traceback."""
    names = [node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)] if handler.type else [""]
    broad = {"", "Exception", "BaseException"} & set(names)
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
    looks = handler.name and any(isinstance(node, ast.Name) and node.id == handler.name for node in ast.walk(handler))
    return bool(broad) and not raises and not looks and "traceback." not in ast.unparse(handler)


def test_no_error_is_swallowed() -> None:
    """No bare except, and no broad one that drops the exception."""
    found = [
        f"{path}:{node.lineno}"
        for path in python_files(*PACKAGES, "scripts", "tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


def probes(path: Path) -> list[tuple[str, str]]:
    """(file, innermost function) of each hasattr and getattr; getattr(torch, name), which finds a dtype, is allowed."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        is_probe = isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}
        if is_probe and ast.unparse(node.args[0]) != "torch":
            found.append((str(path), function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(parse(path), "")
    return found


def test_attributes_are_not_probed() -> None:
    found = {probe for path in python_files(*PACKAGES, "scripts") for probe in probes(path)}
    assert found - PROBING.keys() == set(), "typed objects have the attribute or not: no getattr, no hasattr"
    assert PROBING.keys() - found == set(), "no longer needed in PROBING"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_can_be_run(script: Path) -> None:
    text = script.read_text()
    assert script.stat().st_mode & 0o111, "not executable"
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
