"""Run a model's program on one test, confined. No expected output and no assertion is here: results are compared elsewhere."""

import atexit
import gc
import json
import random
import sys
import threading
import weakref
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

from trainer.rewards.confine import landlock_version
from trainer.rewards.forkserver import PEER_FD, flush, serve
from trainer.rewards.proxies import Peer

# Programs of contests lean on these being there, with all their names; the later hides the earlier.
_MODULES = [
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "builtins",
    "typing",
]
# Where a kernel without Landlock lets programs open no file, these are there for their imports.
_MORE = [
    *(
        "numpy",
        "abc",
        "argparse",
        "array",
        "ast",
        "asyncio",
        "base64",
        "binascii",
        "calendar",
        "cmath",
        "concurrent.futures.thread",
    ),
    *(
        "contextlib",
        "csv",
        "ctypes",
        "dataclasses",
        "decimal",
        "difflib",
        "enum",
        "fractions",
        "graphlib",
        "hashlib",
        "html",
        "inspect",
    ),
    *("keyword", "locale", "logging", "numbers", "os", "pathlib", "pickle", "pprint", "pytest", "queue", "resource", "secrets"),
    *("shlex", "signal", "struct", "_strptime", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "traceback"),
    *("types", "unicodedata", "unittest.mock", "urllib.parse", "uuid", "warnings", "weakref", "zlib", "zoneinfo"),
]
_RECURSION_LIMIT = 100_000


def main(fd: int) -> None:
    prelude = prepare()
    serve(fd, lambda job: run(job, prelude))


def prepare() -> dict[str, Any]:
    """In the server: import once what every program gets."""
    prelude: dict[str, Any] = {}
    for module in _MODULES:
        exec(f"from {module} import *", prelude)
    for module in _MODULES:
        exec(f"import {module}", prelude)
    for module in _MORE if landlock_version() == 0 else []:
        with suppress(ImportError):  # not all are Python's own
            import_module(module)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    atexit._clear()  # what runs at the end of a program is the program's own
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    gc.freeze()  # a collection in a job then looks at the job's objects alone
    return prelude


def main_module(name: str, prelude: dict[str, Any]) -> dict[str, Any]:
    """Namespace of a new module that has the prelude. It is registered: dataclasses and typing look annotations up there."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(prelude, __name__=name)
    return vars(module)


def run(job: dict[str, Any], prelude: dict[str, Any]) -> str:
    """job: ``code``, and for a function ``fn_name`` with ``arguments``, or with ``serve`` whatever assertions call (PEER_FD).

    Returns the function's result as JSON, or nothing: a program prints. Raises what the program raises, but for SystemExit, with
    which a program that prints may end.
    """
    random.seed(0)
    code, function = job["code"], job.get("fn_name")
    prints = function is None and "serve" not in job
    namespace = main_module("__main__" if prints else "solution", prelude)
    program = compile(code, "<solution>", "exec")
    if prints:
        with suppress(SystemExit):
            exec(program, namespace)
        _finish(namespace, prelude)
        return ""

    def look_up(name: str) -> Any:
        if name not in namespace or (name in prelude and namespace[name] is prelude[name]):
            raise NameError(f"the program has no {name}")
        return namespace[name]

    exec(program, namespace)
    if "serve" in job:
        Peer(PEER_FD).serve(look_up)
    assert function is not None
    call = attrgetter(function)(namespace["Solution"]()) if "Solution" in namespace else look_up(function)
    return json.dumps(call(*job["arguments"]), default=list)


def _finish(namespace: dict[str, Any], prelude: dict[str, Any]) -> None:
    """What Python does when a program ends, in its order: wait for threads, run exit functions, drop globals (files flush)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    sys.stdout = sys.__stdout__
    for name in [*namespace]:
        if namespace.get(name) is not prelude.get(name):  # what Python gives is still there for __del__
            namespace[name] = None
    gc.collect()
