import asyncio
import re
from pathlib import Path

import pytest

from trainer.run.user_code import check_source, describe, load_function, load_module

FILE = """
def mine(x):
    return x + 1

def other(x):
    return x
"""
GROUPED = """import asyncio


async def fails():
    raise ValueError('two\\nlines')

async def main():
"""


def test_function_is_loaded_from_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(FILE)
    mine = load_function(str(tmp_path / "my.py"), "mine", "some.key")
    assert mine(1) == 2
    assert load_function(str(tmp_path / "my.py"), "mine", "some.key") is mine, "a file is executed once per process"


@pytest.mark.parametrize(
    ("text", "path", "name", "output"),
    [
        (FILE, "not_there.py", "mine", r"some\.key: no such file; .* has my\.py"),
        (FILE, "my.py", "mien", r"some\.key: my\.py has no function mien; it has mine, other"),
        (
            "import nothing_like_it",
            "my.py",
            "mine",
            r"some\.key: my\.py does not load: ModuleNotFoundError: No module named .* \(my\.py:1\)",
        ),
        ("raise SystemExit(3)", "my.py", "mine", r"some\.key: my\.py does not load: SystemExit: 3"),
        ("def mine(:", "my.py", "mine", r"some\.key: my\.py does not load: SyntaxError"),
    ],
)
def test_invalid_function_is_a_one_line_error(tmp_path: Path, text: str, path: str, name: str, output: str) -> None:
    (tmp_path / "my.py").write_text(text)
    with pytest.raises(ValueError, match=output) as caught:
        load_function(str(tmp_path / path), name, "some.key")
    assert "\n" not in str(caught.value)


def test_error_names_the_users_own_line(tmp_path: Path) -> None:
    """Not the line of the library that the user's line called."""
    (tmp_path / "deep.py").write_text(
        "import json\n\ndef read(text):\n    return json.loads(text)\n\ndef mine(x):\n    return read(x)\n"
    )
    with pytest.raises(ValueError) as caught:
        load_function(str(tmp_path / "deep.py"), "mine", "some.key")("{")
    assert describe(caught.value).startswith("JSONDecodeError: Expecting ") and describe(caught.value).endswith(" (deep.py:4)")


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (FILE, "my.py has no function compute_score; it has mine, other"),
        ("limit = 3\n", "my.py has no function compute_score; it has none"),
        ("def compute_score(:", "my.py does not load: SyntaxError: "),
        ("\0", "my.py does not load: "),
    ],
)
def test_function_is_checked_without_executing_the_file(tmp_path: Path, text: str, output: str) -> None:
    (tmp_path / "my.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        check_source(str(tmp_path / "my.py"), "compute_score", "some.key")
    assert str(caught.value).startswith(f"some.key: {output}")


def test_imported_function_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("from mine import *\n")
    check_source(str(tmp_path / "my.py"), "compute_score", "some.key")


def test_error_in_a_file_of_a_package_names_the_files_own_line(tmp_path: Path) -> None:
    file = tmp_path / "neighbour.py"
    file.write_text("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    module = load_module(file, "some.package")
    assert module.__package__ == "some.package"
    with pytest.raises(ValueError) as caught:
        module.read("{")
    assert describe(caught.value).endswith("(neighbour.py:5)")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("async with asyncio.TaskGroup() as tasks: tasks.create_task(fails())", r"^ValueError: two lines \(grouped\.py:5\)$"),
        ("raise ExceptionGroup('all', [ExceptionGroup('some', [KeyError('k')])])", r"^KeyError: 'k' \(grouped\.py:8\)$"),
    ],
)
def test_a_group_is_described_by_its_first_exception(tmp_path: Path, body: str, expected: str) -> None:
    file = tmp_path / "grouped.py"
    file.write_text(GROUPED + f"    {body}\n")
    main = load_function(str(file), "main", "key")
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert re.search(expected, describe(caught.value))
