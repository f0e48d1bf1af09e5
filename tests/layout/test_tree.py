"""Rules of the source tree: folders, imports between them, and sizes of folders and classes."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.layout.source import imports, parse, python_files

PACKAGES = ("configs", "workers", "trainer")
MOST_MODULES = 12
MOST_FIELDS = 15
# Classes with more fields or constructor arguments -> why, and until when.
WIDE: dict[str, str] = {}
# A module name that several folders of a package share -> why.
SHARED_NAMES = {"base": "the interface of the engines in that folder", "__main__": "python -m of a folder"}


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in python_files(*PACKAGES)}


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of this repository that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    for _, name in imports(path):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name:
            yield name


@cache
def module_graph() -> dict[str, set[str]]:
    return {module: set(imported_modules(path)) - {module} for module, path in modules().items()}


def folders_of(graph: Mapping[str, set[str]], home: Mapping[str, Path]) -> dict[Path, set[Path]]:
    """{folder: other folders whose modules it imports}."""
    found: dict[Path, set[Path]] = defaultdict(set)
    for module, imported in graph.items():
        if home[module].name.startswith("main_"):  # an entry point: nothing imports it
            continue
        found[home[module].parent] |= {home[name].parent for name in imported} - {home[module].parent}
    return found


def mutual(folders: Mapping[Path, set[Path]]) -> list[tuple[str, str]]:
    return sorted((str(a), str(b)) for a, reached in folders.items() for b in reached if a in folders.get(b, ()) and a < b)


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_folder_holds_at_most_twelve_modules() -> None:
    # Entry points are programs, not modules that a reader has to relate to each other.
    files = [path for path in python_files(*PACKAGES) if path.name != "__init__.py" and not path.match("trainer/main_*.py")]
    counts = Counter(str(path.parent) for path in files)
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_trainer_holds_entry_points_and_folders() -> None:
    flat = [path.name for path in python_files("trainer") if path.parent == Path("trainer")]
    assert [name for name in flat if not name.startswith("main_")] == ["__init__.py", "harness.py"]


def test_two_folders_never_import_each_other() -> None:
    assert mutual(folders_of(module_graph(), modules())) == []


def test_modules_have_no_import_cycle() -> None:
    assert cycle_in(module_graph()) == []


def test_the_rules_find_a_cycle_and_a_mutual_import() -> None:
    home = {"a.x": Path("a/x.py"), "a.y": Path("a/y.py"), "b.z": Path("b/z.py")}
    graph = {"a.x": {"b.z"}, "b.z": {"a.y"}, "a.y": set[str]()}
    assert cycle_in(graph) == [] and mutual(folders_of(graph, home)) == [("a", "b")]
    assert set(cycle_in(graph | {"a.y": {"a.x"}})) == {"a.x", "a.y", "b.z"}


def test_run_imports_nothing_else_of_trainer() -> None:
    found = {
        str(path): [name for name in imported_modules(path) if name.startswith("trainer") and not name.startswith("trainer.run")]
        for path in python_files("trainer/run")
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_library_modules_do_not_import_the_command_line() -> None:
    programs = {path for path in python_files("trainer") if path.match("trainer/main_*.py")} | {Path("trainer/__init__.py")}
    found = [
        str(path)
        for path in python_files("trainer")
        if path not in programs and path.parent != Path("trainer/cli")
        if any(name.startswith("trainer.cli") for name in imported_modules(path))
    ]
    assert found == []


def test_module_names_are_unique_within_a_package() -> None:
    for package in ("trainer", "workers"):
        counts = Counter(path.stem for path in python_files(package) if path.name != "__init__.py")
        assert {name for name, count in counts.items() if count > 1} - SHARED_NAMES.keys() == set()


def width(node: ast.ClassDef) -> int:
    """Fields of a dataclass or arguments of __init__, whichever is more."""
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)]
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    arguments = [
        len(item.args.posonlyargs) + len(item.args.args) + len(item.args.kwonlyargs) - 1
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ]
    return max([len(fields) if is_dataclass else 0, *arguments])


def test_a_class_has_at_most_fifteen_fields() -> None:
    """Configuration blocks have as many as their YAML has keys."""
    wide = {
        f"{path}:{node.name}"
        for path in python_files(*PACKAGES)
        if not path.is_relative_to("configs/schema")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and width(node) > MOST_FIELDS
    }
    assert wide - WIDE.keys() == set()
    assert WIDE.keys() - wide == set(), "no longer needed in WIDE"
