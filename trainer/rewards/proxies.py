"""Calls between two processes of which one does not trust the other: the assertions about a program, and the program.

Plain values are copied, in JSON with tags, and rebuilt from a fixed table: no pickles, so no code travels. Everything else
(functions, classes, objects of a program's own classes) stays in its process; the other process holds a ``Remote``, whose
operations are carried out there. The program must not decide whether it is right, so it is never given a value to compare with
its own: a Remote has no comparisons, no ``in``, and no arithmetic with plain values.
"""

import builtins
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, NoReturn

_SCALARS = frozenset({bool, int, float, str, type(None)})


def _items(value: dict) -> list:
    return [part for pair in value.items() for part in pair]


def _mapping(parts: list) -> dict:
    return dict(zip(parts[::2], parts[1::2], strict=True))


# A plain value of another type: its parts, and the value that they make.
_VALUES: dict[type, tuple[Callable[[Any], list], Callable[[list], Any]]] = {
    list: (list, list),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    dict: (_items, _mapping),
    defaultdict: (_items, _mapping),
    OrderedDict: (_items, lambda parts: OrderedDict(_mapping(parts))),
    Counter: (_items, lambda parts: Counter(_mapping(parts))),
    deque: (lambda value: [value.maxlen, *value], lambda parts: deque(parts[1:], parts[0])),
    bytes: (lambda value: [value.hex()], lambda parts: bytes.fromhex(*parts)),
    bytearray: (lambda value: [value.hex()], lambda parts: bytearray.fromhex(*parts)),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    slice: (lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    Decimal: (lambda value: [str(value)], lambda parts: Decimal(*parts)),
    Fraction: (lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    datetime: (lambda value: [value.isoformat()], lambda parts: datetime.fromisoformat(*parts)),
    date: (lambda value: [value.isoformat()], lambda parts: date.fromisoformat(*parts)),
    time: (lambda value: [value.isoformat()], lambda parts: time.fromisoformat(*parts)),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
}
_MAKE = {kind.__name__: make for kind, (_, make) in _VALUES.items()}
_ARRAY_KINDS = "biufcU"  # numpy's: numbers and text, no objects
_LOCAL_NAMES = ("__name__", "__doc__", "__dict__")  # other such names are how Python and numpy ask an object to decide for them

_BETWEEN_REMOTES = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
_OF_REMOTES = [
    "iter",
    "next",
    "len",
    "bool",
    "int",
    "float",
    "str",
    "repr",
    "abs",
    "neg",
    "pos",
    "invert",
    "getitem",
    "setitem",
    "delitem",
]
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "has_instance": lambda kind, value: isinstance(value, kind),
    **{name: (vars(operator) | vars(builtins))[name] for name in [*_OF_REMOTES, *_BETWEEN_REMOTES]},
}


class Remote:
    """An object that lives in the other process."""

    __slots__ = ("_handle", "_peer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, peer: "Peer", handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise TypeError("an object of the program cannot be compared: its class would decide the result")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _LOCAL_NAMES:
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._peer.ask("has_instance", self, value) is True


def _of_remotes(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.ask(name, self, *args)


def _between_remotes(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._peer.ask(name, self, other) if type(other) is Remote else NotImplemented


for _name in _OF_REMOTES:
    setattr(Remote, f"__{_name}__", _of_remotes(_name))
for _name in _BETWEEN_REMOTES:
    setattr(Remote, f"__{_name.strip('_')}__", _between_remotes(_name))


class Peer:
    """One end of the line, a stream socket."""

    def __init__(self, fd: int, own_module: str | None = None) -> None:
        """own_module: set at the end that does not trust the other. The other reaches functions and classes of that module, their
        objects, and iterators, and no attribute whose name begins with an underscore.
        """
        sys.set_int_max_str_digits(0)  # numbers travel as text
        self._fd = fd
        self._lines = open(fd, "rb", closefd=False)  # noqa: SIM115  for as long as the process lives
        self._own_module = own_module
        self._objects: list[Any] = []
        self._exceptions: dict[str, type[BaseException]] = {}

    def serve(self, names: Callable[[str], Any]) -> NoReturn:
        """Answer until the other end is gone. names: what a name stands for; raises NameError."""
        self._objects.append(names)
        while True:
            self._answer(*self._receive()[1:])

    def look_up(self, name: str) -> Any:
        """What the name stands for at the end that serves."""
        return self.ask("call", Remote(self, 0), name)

    def ask(self, operation: str, subject: Any, *args: Any, **kwargs: Any) -> Any:
        """What the operation returns there. Raises what it raises there."""
        given = [*args, *kwargs.values()]
        self._send(["ask", operation, self._encode(subject), [self._encode(value) for value in given], [*kwargs]])
        while (message := self._receive())[0] == "ask":
            self._answer(*message[1:])
        try:
            kind, result, *states = message
            result, states = self._decode(result), [self._decode(state) for state in states]
        except Exception as error:  # the other end has not sent what this module sends
            _leave(error)
        if kind == "raise":
            # One that ends loops must not come out of a call: all(map(candidate, ...)) would hold.
            if isinstance(result, StopIteration | StopAsyncIteration | GeneratorExit) and operation != "next":
                raise RuntimeError(f"{type(result).__name__} was raised")
            raise result if isinstance(result, BaseException) else TypeError("exceptions must derive from BaseException")
        for value, state in zip(given, states, strict=False):
            _set_state(value, state)
        return result

    def _answer(self, operation: str, subject: Any, args: list, keywords: list[str]) -> None:
        try:
            subject, given = self._decode(subject), [self._decode(value) for value in args]
            if self._own_module is not None and not self._may(operation, subject, given):
                raise TypeError(f"{operation}: not for the program")
            split = len(given) - len(keywords)
            result = _OPERATIONS[operation](subject, *given[:split], **dict(zip(keywords, given[split:], strict=True)))
            # Arguments are written back from functions that return None: those work in place. From others they are not, for a
            # program that empties its argument and returns [] would pass f(x) == sorted(x).
            answer = ["return", self._encode(result), *([self._encode(value) for value in given] if result is None else [])]
        except BaseException as error:
            answer = ["raise", self._encode(error)]
        self._send(answer)

    def _may(self, operation: str, subject: Any, args: list) -> bool:
        if isinstance(subject, FunctionType | MethodType | type):
            return operation == "call" and self._is_own(subject)
        if isinstance(subject, Iterator):
            return operation in ("iter", "next")
        private = operation in ("getattr", "setattr") and (type(args[0]) is not str or args[0].startswith("_"))
        return self._is_own(subject) and not private

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, MethodType):
            return self._is_own(value.__self__)
        return isinstance(value, Iterator) or self._own_module == (
            value.__module__ if isinstance(value, FunctionType | type) else type(value).__module__
        )

    def _send(self, message: list) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            _leave(error)

    def _receive(self) -> list:
        try:
            message = json.loads(self._lines.readline())
            assert {"ask": 5, "raise": 2}.get(message[0], len(message)) == len(message) >= 2
        except Exception as error:  # the end of the line, or no line of this module
            _leave(error)
        return message

    def _encode(self, value: Any) -> Any:
        """A scalar, or [tag, parts]."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in _VALUES:
            parts = _VALUES[kind][0](value)
            return [kind.__name__, parts if _SCALARS.issuperset(map(type, parts)) else [self._encode(part) for part in parts]]
        if kind is Remote:
            return ["yours", [value._handle]]
        if kind.__module__ == "numpy" and (array := _array_parts(value)):
            return ["array", [self._encode(part) for part in array]]
        if isinstance(value, BaseException):
            return ["exception", [self._encode(kind), *(self._encode(part) for part in value.args)]]
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["class", [value.__name__]]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception class", [value.__name__, self._encode(value.__base__)]]
        if self._own_module is None and isinstance(value, Enum | tuple) and isinstance(value, int | str | tuple):
            return self._encode(_base_value(value))
        if self._own_module is not None and not self._is_own(value):
            if isinstance(value, BuiltinFunctionType | MethodDescriptorType | FunctionType | type):
                home = value.__objclass__ if isinstance(value, MethodDescriptorType) else value
                return ["known", [home.__module__, value.__qualname__]]
            raise TypeError(f"a program cannot be given a {kind.__name__}")
        self._objects.append(value)
        return ["mine", [len(self._objects) - 1]]

    def _decode(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        tag, parts = value
        if not _SCALARS.issuperset(map(type, parts)):
            parts = [self._decode(part) for part in parts]
        if tag in _MAKE:
            return _MAKE[tag](parts)
        if tag == "mine":
            return Remote(self, int(parts[0]))
        if tag == "yours":
            return self._objects[parts[0]]
        if tag == "array":
            return _array(*parts)
        if tag == "exception":
            error = parts[0].__new__(parts[0], *parts[1:])
            error.args = tuple(parts[1:])
            return error
        if tag == "class":
            kind = vars(builtins)[parts[0]]
            assert isinstance(kind, type)
            return kind
        if tag == "exception class":
            return self._exceptions.setdefault(parts[0], type(parts[0], (parts[1],), {}))
        assert tag == "known" and self._own_module is None, tag
        return operator.attrgetter(parts[1])(import_module(parts[0]))


def _base_value(value: Any) -> Any:
    """What an IntEnum, a StrEnum or a named tuple is equal to."""
    if isinstance(value, int):
        return int(value)
    return str.__str__(value) if isinstance(value, str) else tuple(value)


def _array_parts(value: Any) -> list | None:
    """dtype and (nested) list of an array or scalar of numpy; None for another object of numpy."""
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in _ARRAY_KINDS:
        return [value.dtype.str, value.tolist()]
    return None


def _array(dtype: str, values: Any) -> Any:
    import numpy

    assert numpy.dtype(dtype).kind in _ARRAY_KINDS, dtype
    return numpy.array(values, dtype)[()]  # of no dimensions: a scalar


def _set_state(value: Any, state: Any) -> None:
    """Give an argument the contents that it has at the other end."""
    if isinstance(value, list | bytearray | deque) and type(state) is type(value):
        value.clear()
        value.extend(state)
    elif isinstance(value, dict | set) and isinstance(state, dict | set):
        value.clear()
        value.update(state)


def _leave(error: Exception) -> NoReturn:
    """Not by an exception, which assertions might catch."""
    os.write(2, f"{error!r}\n".encode())
    os._exit(1)
