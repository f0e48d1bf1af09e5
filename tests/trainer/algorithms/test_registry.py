from pathlib import Path

import pytest

from trainer.algorithms.registry import Registry
from workers.controller.rpc import pack, unpack

FILE = """
from tests.trainer.algorithms.test_registry import REGISTRY

def plain(x, config=None):
    return helper(x)

def narrow(x):
    return x

def helper(x):
    return 2 * x

@REGISTRY.register("wants", needs={"values"}, prepare=helper)
def registered(x, config):
    return x
"""
REGISTRY: Registry = Registry("some.key")


def test_user_function_is_found_and_its_registrations_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert REGISTRY[f"{file}:plain"](3) == 6 and REGISTRY.needs(f"{file}:plain") == frozenset()
    assert REGISTRY[f"{file}:registered"] is REGISTRY["wants"]
    assert REGISTRY.needs(f"{file}:registered") == {"values"} and REGISTRY.prepare(f"{file}:registered")(2) == 4
    assert REGISTRY.prepare(f"{file}:plain") is None
    assert "wants" in list(REGISTRY) and f"{file}:plain" not in list(REGISTRY)


def test_user_function_is_pickled_by_value(tmp_path: Path) -> None:
    """Another node does not have the file: the code itself is pickled, with the functions it calls."""
    file = tmp_path / "gone.py"
    file.write_text(FILE.replace('"wants"', '"wants too"'))
    function = REGISTRY[f"{file}:plain"]
    message = pack(function)
    file.unlink()
    copy = unpack(message)
    assert copy is not function and copy(5) == 10


def test_errors_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some\.key=.*nowhere\.py:f: no such file"):
        REGISTRY[f"{tmp_path}/nowhere.py:f"]
    (tmp_path / "mine.py").write_text(FILE.replace('"wants"', '"wants again"'))
    with pytest.raises(ValueError, match=r"mine\.py:narrow: narrow\(x\) must take two arguments, \(inputs, config\): too many"):
        REGISTRY[f"{tmp_path}/mine.py:narrow"]
    with pytest.raises(ValueError, match=r"some\.key=f is not known; known: .*or FILE\.py:FUNCTION of your own"):
        Registry("some.key")["f"]
