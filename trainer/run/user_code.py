"""Load functions, such as rewards, from Python files of the user."""

import ast
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle

from trainer.run.verl_names import missing, verl_modules

MOST_CHARACTERS = 2000  # of an exception's text: it is kept with its response
_PREFIX = "user_"  # of module names: keeps them apart from installed modules, and marks a user's frames in a traceback


def load_function(path: str, name: str, key: str) -> Callable[..., Any]:
    """Load the function ``name`` of the Python file ``path``. It is pickled by value: other nodes need no copy of the file.

    key: configuration key that error messages name. Raises ValueError (one line) if the file does not exist, cannot be loaded or
    has no such function.
    """
    file = check_file(path, key)
    try:
        module = load_module(file)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{key}: {file.name} does not load: {describe(error)}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{key}: {file.name} has no function {name}; it has {_own(module, callable)}")
    return function


def load_class(path: str, name: str, key: str) -> type[Any]:
    """Load the class ``name`` of the Python file ``path``, see load_function."""
    file = check_file(path, key)
    try:
        module = load_module(file)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{key}: {file.name} does not load: {describe(error)}") from error
    found = vars(module).get(name)
    if not isinstance(found, type):
        raise ValueError(f"{key}: {file.name} has no class {name}; it has {_own(module, inspect.isclass)}")
    return found


def _own(module: ModuleType, is_one: Callable[[Any], bool]) -> str:
    """Names of the functions or classes that the module defines, for messages."""
    own = [name for name, value in vars(module).items() if is_one(value) and value.__module__ == module.__name__]
    return ", ".join(own) or "none"


def check_file(path: str, key: str) -> Path:
    """Absolute path of the file. Raises ValueError if it does not exist or its name does not end in .py."""
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        there = ", ".join(sorted(entry.name for entry in file.parent.glob("*.py"))) or "no Python file"
        raise ValueError(f"{key}: no such file; {file.parent} has {there}")
    if file.suffix != ".py":
        raise ValueError(f"{key}: not a Python file; its name must end in .py")
    return file


def check_source(path: str, name: str, key: str, kind: Literal["function", "class"] = "function") -> None:
    """Check without executing the file that it exists, parses and mentions ``name``. Raises ValueError (one line)."""
    file = check_file(path, key)
    text = file.read_bytes()
    try:
        tree = ast.parse(text, file.name)
    except SyntaxError as error:
        raise ValueError(f"{key}: {file.name} does not load: {describe(error)}") from error
    # Text search, not a search for a def: the function may be imported, assigned or returned by a decorator.
    if name.encode() not in text and b"import *" not in text:
        there = [node.name for node in tree.body if isinstance(node, ast.FunctionDef if kind == "function" else ast.ClassDef)]
        raise ValueError(f"{key}: {file.name} has no {kind} {name}; it has {', '.join(there) or 'none'}")


@cache
def load_module(file: Path, package: str = "") -> ModuleType:
    """Import the file, once per process: executing it again would register its functions twice. It may import verl's names.

    package: what the file's relative imports start from.
    """
    # The checksum of the path distinguishes two files of the same name.
    name = f"{package}.{_PREFIX}{file.stem}_{zlib.crc32(bytes(file)):08x}".removeprefix(".")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look up a class's module there
    with verl_modules():
        spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def describe(error: BaseException) -> str:
    """Format an exception as one line: type, message, file and line.

    The line is the innermost one of a user's file, otherwise the one that raised. Of a group, which task groups raise, it is the
    first exception.
    """
    trace = error.__traceback__
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        trace = error.__traceback__ or trace
    if isinstance(error, SyntaxError):  # its message says where
        return f"SyntaxError: {error}"
    frames = list(traceback.walk_tb(trace))
    own = [at for at in frames if at[0].f_globals.get("__name__", "").rpartition(".")[2].startswith(_PREFIX)]
    frame, line = (own or frames)[-1]
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
    return f"{type(error).__name__}: {text} ({Path(frame.f_code.co_filename).name}:{line}){missing(error)}"
