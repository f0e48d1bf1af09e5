"""Files of the source tree, and their imports, for the rules of tests/layout."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "workers", "trainer", "data_preprocess")


BINARY = {".pyc", ".png", ".parquet", ".safetensors"}


@cache
def python_files(*trees: str) -> tuple[Path, ...]:
    """Paths relative to ROOT of the .py files under ``trees`` (all packages, if none is named)."""
    return tuple(sorted(path.relative_to(ROOT) for tree in trees or PACKAGES for path in (ROOT / tree).rglob("*.py")))


@cache
def written_files() -> tuple[Path, ...]:
    """Paths relative to ROOT of all text files of the repository, except the licence."""
    trees = [*PACKAGES, "scripts", "tests", "docs", "examples", "requirements", ".ci"]
    paths = [path for tree in trees for path in (ROOT / tree).rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.suffix in {".py", ".toml", ".md", ".yaml", ".yml", ".cff"}]
    return tuple(
        sorted(
            path.relative_to(ROOT)
            for path in paths
            if path.is_file()
            and "__pycache__" not in path.parts
            and path.suffix not in {".pyc", ".png", ".parquet", ".safetensors"}
        )
    )


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a file, in functions too; relative ones made absolute."""
    package = path.parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def top_level(name: str) -> str:
    return name.partition(".")[0]
