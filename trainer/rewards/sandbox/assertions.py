"""Evaluate a data set's assertions about a program, in a sandboxed process separate from the program's.

Problem: assertions call the program's functions (``assert f(2) == 4``). In one process the program could redefine ``==``, read
the expected value from the stack, or print «passed» and exit. Idea: two processes. This one holds the assertions and never runs
code of the program; each function of the program is a proxy (proxies.py), which sends arguments and receives plain values,
compared here. Cost: one more fork per test, and a round trip over a socket per call.
"""

import ast
import builtins
import random
import symtable
from types import ModuleType
from typing import Any

from trainer.rewards.sandbox.forkserver import PEER_FD, serve
from trainer.rewards.sandbox.proxies import Peer
from trainer.rewards.sandbox.sandbox import main_module, prepare

_MODULE = "assertions"
# Names that assertions of known data sets use without importing them.
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
PASSED = "passed"


def main(fd: int) -> None:
    """Entry point of the fork server."""
    prelude = prepare()
    serve(fd, lambda job: run(job, prelude))


def run(job: dict[str, Any], prelude: dict[str, Any]) -> str:
    """Run the assertions of a job; return PASSED if they hold, raise what they raise.

    job: ``asserts``, the source; for HumanEval also ``entry_point``, an expression that is passed to the function ``check``.
    """
    # Assertions may sample test inputs: the same ones for every program.
    random.seed(0)
    asserts, entry_point = job["asserts"], job.get("entry_point")
    peer = Peer(PEER_FD, own_module=_MODULE)
    namespace = main_module(_MODULE, prelude)
    free = _free_names(asserts)
    for name in free & _ALIASES.keys():
        namespace[name] = __import__(_ALIASES[name])
    free -= _ALIASES.keys()
    # A name that must come from the program and is missing fails the test. Other unknown names may be used only on a path that is
    # never taken; those raise when they are read.
    tested = _names(entry_point) if entry_point else _tested(asserts, free, prelude)
    for name in tested | (free - prelude.keys() - vars(builtins).keys()):
        try:
            namespace[name] = peer.look_up(name)
        except NameError:
            if name in tested:
                raise
    exec(compile(f"{asserts}\ncheck({entry_point})" if entry_point else asserts, "<assertions>", "exec"), namespace)
    return PASSED


def _free_names(text: str) -> set[str]:
    """Global names that the source reads and does not bind."""
    top = symtable.symtable(text, "<assertions>", "exec")
    tables, read = [top], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {name.get_name() for name in table.get_symbols() if name.is_referenced() and (name.is_global() or table is top)}
    return read - {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


def _tested(asserts: str, free: set[str], prelude: dict[str, Any]) -> set[str]:
    """Names that the program must define, derived from the assertions only. Raises NameError if they are ambiguous."""
    # Independent of the program: one that defines ``sorted`` or ``isclose`` would otherwise replace the function that checks its
    # result. A name of Python or of the prelude is taken from the program only if the assertions contain no other name, apart
    # from functions applied to its result. Several remaining names are accepted if each is compared with constants only: none
    # of them then takes part in the test of another.
    own = free - prelude.keys() - vars(builtins).keys()
    known = {name for name in free & prelude.keys() if not isinstance(prelude[name], ModuleType)} - vars(builtins).keys()
    names = own or known or free & vars(builtins).keys()
    if names is own or len(names) == 1:
        return names
    tree = ast.parse(asserts)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in names]
    outer = {_called(call) for call in calls for node in ast.walk(call) if node in calls and _called(node) != _called(call)}
    if len(names - outer) != 1 and not _compared_with_constants(tree, names - outer):
        raise NameError(f"ambiguous assertions: cannot tell which of {', '.join(sorted(names))} the program defines")
    return names - outer


def _compared_with_constants(tree: ast.Module, names: set[str]) -> bool:
    """Whether every use of the names is a call that is compared with constants."""
    accepted = set()
    for comparison in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = [comparison.left, *comparison.comparators]
        called = [side for side in sides if _called(side) in names]
        parts = [part for side in sides if side not in called for part in ast.walk(side)]
        if len(called) == 1 and not any(isinstance(part, ast.Name | ast.Call) for part in parts):
            accepted |= {call.func for call in called if isinstance(call, ast.Call)}
    return len(names) > 0 and accepted == {node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names}


def _called(node: ast.AST) -> str | None:
    """Name of the called function if the node is a call of a plain name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
