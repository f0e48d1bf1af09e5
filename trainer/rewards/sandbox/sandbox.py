"""Run a model-generated program on one test, in a sandboxed process.

The program shares its process with this module and may read or change anything in it. Hence neither expected outputs nor
assertions are ever here: the process returns what the program printed or returned, and another one compares it. The rest makes
honest programs work as they would in a plain interpreter: the names that contest programs assume, recursion, exit handlers,
threads and output that is flushed at the end.
"""

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

from trainer.rewards.sandbox.forkserver import PEER_FD, flush, serve
from trainer.rewards.sandbox.proxies import Peer
from trainer.rewards.sandbox.seccomp import landlock_version

# Contest programs assume that these modules and all their names are imported. Order matters: later names hide earlier ones.
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
# Without Landlock programs cannot open files, hence not import; these modules are imported before the sandbox is entered.
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
    """Entry point of the fork server."""
    prelude = prepare()
    serve(fd, lambda job: run(job, prelude))


def prepare() -> dict[str, Any]:
    """Import, once in the server, everything that programs get; return the names they see (the prelude)."""
    prelude: dict[str, Any] = {}
    for module in _MODULES:
        exec(f"from {module} import *", prelude)
    for module in _MODULES:
        exec(f"import {module}", prelude)
    for module in _MORE if landlock_version() == 0 else []:
        with suppress(ImportError):  # some are third-party packages
            import_module(module)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    # Exit handlers of imported modules must not run at the end of a program; those of the program do, see _finish.
    atexit._clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    # Keep the collector away from the modules' objects: touching them would copy the pages shared with the server.
    gc.freeze()
    return prelude


def main_module(name: str, prelude: dict[str, Any]) -> dict[str, Any]:
    """Namespace of a new module with the prelude's names."""
    # Registered in sys.modules, where dataclasses and typing resolve annotations.
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(prelude, __name__=name)
    return vars(module)


def run(job: dict[str, Any], prelude: dict[str, Any]) -> str:
    """Run the program of a job; return the function's result as JSON, or "" for a program that prints.

    job: ``code``; for a function ``fn_name`` and ``arguments``; with ``serve`` the calls of assertions over PEER_FD. Raises what
    the program raises, except SystemExit of a program that prints.
    """
    # Programs that use random numbers give the same result in every run.
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
        # A name that is still the prelude's was not defined by the program: ``sorted`` must not pass for its solution.
        if name not in namespace or (name in prelude and namespace[name] is prelude[name]):
            raise NameError(f"the program has no {name}")
        return namespace[name]

    exec(program, namespace)
    if "serve" in job:
        Peer(PEER_FD).serve(look_up)
    assert function is not None
    call = attrgetter(function)(namespace["Solution"]()) if "Solution" in namespace else look_up(function)
    return json.dumps(call(*job["arguments"]), default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has for a value that it does not know: a list of an iterable, also of NumPy's, and a number of NumPy's."""
    try:
        return value.tolist()
    except AttributeError:
        return list(value)


def _finish(namespace: dict[str, Any], prelude: dict[str, Any]) -> None:
    """Finalise as the interpreter does, in its order: join threads, run exit handlers, drop globals (which flushes files)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    sys.stdout = sys.__stdout__
    for name in [*namespace]:
        if namespace.get(name) is not prelude.get(name):  # the prelude stays available to __del__ methods
            namespace[name] = None
    gc.collect()
