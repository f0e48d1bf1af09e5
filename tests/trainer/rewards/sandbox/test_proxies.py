"""Messages that the trusted end accepts, and objects that it exposes."""

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.rewards.sandbox.proxies import Peer, Remote


@pytest.fixture(autouse=True)
def limit_of_digits() -> Iterator[None]:
    """A peer removes the process's limit of an integer's digits, which parsers elsewhere rely on."""
    before = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(before)


class Own:
    """A class defined by assertions."""

    public, _private = 1, 2

    def method(self) -> int:
        return self.public


def function() -> int:
    return 3


@pytest.fixture
def ends() -> Iterator[tuple[Peer, socket.socket]]:
    trusted_end, program_end = socket.socketpair()
    with trusted_end, program_end:
        yield Peer(trusted_end.fileno(), own_module=__name__), program_end


@pytest.mark.parametrize(
    "sent",
    [
        ["known", ["builtins", "eval"]],
        ["class", ["eval"]],
        ["class", ["__import__"]],
        ["array", ["|O", ["list", [3]]]],
        ["array", ["|V8", ["x"]]],
        ["yours", [1]],
        ["yours", [["slice", [0, None, None]]]],
        ["yours", [-1]],
        ["yours", [False]],
        ["mine", ["1"]],
        ["mine", [-1]],
        ["mine", [1, 2]],
        ["exception", [["class", ["object"]], 3]],
        ["exception", [["class", ["type"]], "C", ["tuple", []], ["dict", []]]],
        ["exception", [["mine", [1]], 3]],
        ["exception class", ["M", ["class", ["type"]]]],
        ["exception class", ["M", ["class", ["int"]]]],
        ["exception class", [["class", ["ValueError"]], ["class", ["ValueError"]]]],
        ["exception class", ["E", ["class", ["ValueError"]], ["dict", ["__eq__", 3]]]],
        ["class", [["list", []]]],
        ["class", ["int", "str"]],
        ["array", ["<f8", ["list", [["mine", [1]]]]]],
        ["array", [["mine", [1]], 3]],
        ["bytes", [["mine", [1]]]],
        ["complex", [["mine", [1]]]],
        ["Decimal", [["tuple", [0, ["tuple", [3]], 0]]]],
        ["Decimal", [3]],
        ["timedelta", [["mine", [1]], 0, 0]],
        ["range", [["mine", [1]]]],
        [["list", []], [3]],
        ["list", "ab"],
        ["set", [["mine", [1]]]],
        ["named tuple", [["list", ["P", "__eq__"]], 3]],
        ["named tuple", [["list", ["P", "x=print(3)"]], 3]],
        ["named tuple", [["list", [["mine", [1]], "x"]], 3]],
        ["named tuple", [["list", ["P", "x"]], 3, 4]],
        ["named tuple", ["P", 3]],
        ["pickle", ["x"]],
        {"a": 3},
        ["list"],
    ],
)
def test_values_come_from_a_fixed_table(ends: tuple[Peer, socket.socket], sent: Any) -> None:
    ends[0]._encode(Own())  # the only object of this end
    with pytest.raises((AssertionError, LookupError, ValueError, TypeError)):
        ends[0]._decode(sent)


@pytest.mark.parametrize(
    ("subject", "operation", "arguments", "answered"),
    [
        (function, "call", [], ["return", 3]),
        (function, "getattr", ["__globals__"], None),
        (function, "getattr", ["__code__"], None),
        (Own(), "getattr", ["public"], ["return", 1]),
        (Own(), "getattr", ["_private"], None),
        (Own(), "getattr", ["__class__"], None),
        (Own(), "setattr", ["__class__", 3], None),
        (Own(), "setattr", ["public", 3], ["return", None, "public", 3]),
        (Own(), "setattr", ["method", 3], None),
        (Own().method, "call", [], ["return", 1]),
        (Own().method, "getattr", ["__func__"], None),
        (Own, "getattr", ["public"], None),
        (iter([7]), "next", [], ["return", 7]),
        (iter([7]), "getattr", ["__reduce__"], None),
    ],
)
def test_program_reaches_only_objects_it_was_given(
    ends: tuple[Peer, socket.socket], subject: Any, operation: str, arguments: list, answered: list | None
) -> None:
    peer, other = ends
    peer._encode(subject)
    peer._answer(operation, ["yours", [0]], arguments, [])
    message = json.loads(other.recv(1 << 16))
    assert message == answered if answered else message[1][1][0] == ["class", ["TypeError"]]


def test_remote_refuses_comparisons_and_protocols(ends: tuple[Peer, socket.socket]) -> None:
    """None of these sends a request; the other end of this test would not reply."""
    remote = Remote(ends[0], 0)
    assert remote != None  # noqa: E711
    for name in ("__array_interface__", "__array__", "__class_getitem__", "__eq_by_program__"):
        assert not hasattr(remote, name)
    for compare in (
        lambda: remote == 3,
        lambda: remote != 3,
        lambda: remote in [3],
        lambda: [remote] == [3],
        lambda: remote == remote,
    ):
        with pytest.raises(TypeError):
            compare()
    for compute in (lambda: remote - 3, lambda: 3 - remote, lambda: remote < 3, lambda: hash(remote), lambda: remote & {3}):
        with pytest.raises(TypeError):
            compute()
