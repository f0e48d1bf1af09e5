"""Evaluate a data set's assertions about a program: confined, in a process apart from the program's."""

import ast
import builtins
import random
import symtable
from types import ModuleType
from typing import Any

from trainer.rewards.forkserver import PEER_FD, serve
from trainer.rewards.proxies import Peer
from trainer.rewards.sandbox import main_module, prepare

_MODULE = "assertions"
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}  # assertions may use them without an import
PASSED = "passed"


def main(fd: int) -> None:
    prelude = prepare()
    serve(fd, lambda job: run(job, prelude))


def run(job: dict[str, Any], prelude: dict[str, Any]) -> str:
    """job: ``asserts``, and for HumanEval the ``entry_point``, an expression, which its function ``check`` gets.

    Returns PASSED if the assertions hold; raises what they raise.
    """
    random.seed(0)
    asserts, entry_point = job["asserts"], job.get("entry_point")
    peer = Peer(PEER_FD, own_module=_MODULE)
    namespace = main_module(_MODULE, prelude)
    free = _free_names(asserts)
    for name in free & _ALIASES.keys():
        namespace[name] = __import__(_ALIASES[name])
    free -= _ALIASES.keys()
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
    """Global names that the text reads and does not bind."""
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
    """Names that the program must define. They must not depend on the program: one that defines ``sorted`` or ``isclose`` would
    decide about itself. So a name of Python's or of the prelude is the program's only where the assertions have no other, but for
    those that are called on its result. Raises NameError if several are left, unless each is compared with constants alone.
    """
    own = free - prelude.keys() - vars(builtins).keys()
    known = {name for name in free & prelude.keys() if not isinstance(prelude[name], ModuleType)} - vars(builtins).keys()
    names = own or known or free & vars(builtins).keys()
    if names is own or len(names) == 1:
        return names
    tree = ast.parse(asserts)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in names]
    outer = {_called(call) for call in calls for node in ast.walk(call) if node in calls and _called(node) != _called(call)}
    if len(names - outer) != 1 and not _compared_with_constants(tree, names - outer):
        raise NameError(f"the assertions do not say which of {', '.join(sorted(names))} is the program's")
    return names - outer


def _compared_with_constants(tree: ast.Module, names: set[str]) -> bool:
    """Every use of the names is a call that is compared with constants: none has a part in the test of another."""
    good = set()
    for comparison in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = [comparison.left, *comparison.comparators]
        called = [side for side in sides if _called(side) in names]
        parts = [part for side in sides if side not in called for part in ast.walk(side)]
        if len(called) == 1 and not any(isinstance(part, ast.Name | ast.Call) for part in parts):
            good |= {call.func for call in called if isinstance(call, ast.Call)}
    return len(names) > 0 and good == {node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names}


def _called(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
