"""Runs a model's program on one test, confined. No expected output is here: what comes back is compared elsewhere."""

import json
import random
import sys
from contextlib import suppress
from operator import attrgetter
from typing import Any

from trainer.rewards.forkserver import serve

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
_RECURSION_LIMIT = 100_000


def main(fd: int) -> None:
    """In the server: import once what every program gets."""
    prelude: dict[str, Any] = {}
    for module in _MODULES:
        exec(f"from {module} import *", prelude)
    for module in _MODULES:
        exec(f"import {module}", prelude)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    serve(fd, lambda job: run(job, prelude))


def run(job: dict[str, Any], prelude: dict[str, Any]) -> str:
    """job: ``code``, and for a function ``fn_name`` with ``arguments``, for assertions ``asserts`` with ``token``.

    Returns the function's result as JSON, the token once the assertions have held, or nothing: a program prints. Raises what the
    program raises, but for SystemExit, with which a program may end.
    """
    random.seed(0)
    code, function = job["code"], job.get("fn_name")
    namespace = dict(prelude, __name__="__main__" if function is None and "asserts" not in job else "solution")
    program = compile(code, "<solution>", "exec")
    if "asserts" in job:
        exec(program, namespace)
        exec(compile(job["asserts"], "<asserts>", "exec"), namespace)
        return job["token"]
    if function is None:
        with suppress(SystemExit):
            exec(program, namespace)
        return ""
    exec(program, namespace)
    if "Solution" not in namespace and namespace.get(function) is prelude.get(function):
        raise NameError(f"the program has no {function}")
    call = attrgetter(function)(namespace["Solution"]()) if "Solution" in namespace else namespace[function]
    return json.dumps(call(*job["arguments"]), default=list)
