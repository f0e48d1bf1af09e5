"""Remote procedure calls between a program under test and the assertions about it, of which only the latter is trusted.

Problem: assertions use results of the program in any way Python allows, and the program must not influence the verdict. Idea:
plain values are copied, as tagged JSON, and rebuilt from a fixed table of types; no pickles, so no code travels. Everything else
(functions, classes, instances of a program's classes) stays in its process; the other process holds a ``Remote``, a proxy whose
operations are executed there. An object of the program must never be asked whether it equals an expected value, since its class
would decide: a Remote has no comparisons, no ``in``, and no arithmetic with plain values. The trusted end in turn exposes only
what the assertions define themselves. Cost: one message each way per operation.
"""

import builtins
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, NoReturn

_SCALARS: frozenset[type] = frozenset({bool, int, float, str, type(None)})


def _items(value: dict) -> list:
    return [part for pair in value.items() for part in pair]


def _mapping(parts: list) -> dict:
    return dict(zip(parts[::2], parts[1::2], strict=True))


_INTEGERS: frozenset[type] = frozenset({int})
_NUMBERS: frozenset[type] = frozenset({int, float})
_TEXT: frozenset[type] = frozenset({str})
# Types copied by value: function to take a value apart, function to rebuild it, and types allowed for its parts (None: any).
# Without the restriction a constructor could call methods of a Remote among the parts, which the program implements.
_VALUES: dict[type, tuple[Callable[[Any], list], Callable[[list], Any], frozenset[type] | None]] = {
    list: (list, list, None),
    tuple: (list, tuple, None),
    set: (list, set, None),
    frozenset: (list, frozenset, None),
    dict: (_items, _mapping, None),
    defaultdict: (_items, _mapping, None),
    OrderedDict: (_items, lambda parts: OrderedDict(_mapping(parts)), None),
    Counter: (_items, lambda parts: Counter(_mapping(parts)), None),
    deque: (lambda value: [value.maxlen, *value], lambda parts: deque(parts[1:], parts[0]), None),
    bytes: (lambda value: [value.hex()], lambda parts: bytes.fromhex(*parts), _TEXT),
    bytearray: (lambda value: [value.hex()], lambda parts: bytearray.fromhex(*parts), _TEXT),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts), _NUMBERS),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts), _INTEGERS),
    slice: (lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts), _SCALARS),
    Decimal: (lambda value: [str(value)], lambda parts: Decimal(*parts), _TEXT),
    Fraction: (lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts), _INTEGERS),
    datetime: (lambda value: [value.isoformat()], lambda parts: datetime.fromisoformat(*parts), _TEXT),
    date: (lambda value: [value.isoformat()], lambda parts: date.fromisoformat(*parts), _TEXT),
    time: (lambda value: [value.isoformat()], lambda parts: time.fromisoformat(*parts), _TEXT),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts), _INTEGERS),
}
_MAKE = {kind.__name__: (make, allowed) for kind, (_, make, allowed) in _VALUES.items()}
_ARRAY_KINDS = "biufcU"  # dtype kinds of NumPy: numbers and text, no objects
# Special attributes that a Remote forwards. All others are protocols by which Python and NumPy let an object decide for itself
# (__array__, __array_ufunc__, __index__, ...).
_LOCAL_NAMES = ("__name__", "__doc__", "__dict__")

_BETWEEN_REMOTES = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
_OF_REMOTES = [
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
    "iter": iter,
    "has_instance": lambda kind, value: isinstance(value, kind),
    **{name: (vars(operator) | vars(builtins))[name] for name in [*_OF_REMOTES, *_BETWEEN_REMOTES]},
}


class Remote:
    """Proxy of an object that lives in the other process."""

    __slots__ = ("_handle", "_peer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, peer: "Peer", handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise TypeError("an object of the program cannot be compared: its own class would decide the result")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _LOCAL_NAMES:
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __iter__(self) -> Iterator:
        """Iterate over the elements. Raises TypeError at the end if their number differs from the reported length."""
        # all(a == b for a, b in zip(result, expected)) would pass for a result that reports a length and yields no elements.
        iterator = self._peer.ask("iter", self)
        try:
            length = len(self)
        except TypeError:  # it has no length
            length = None
        return _elements(iterator, length)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._peer.ask("has_instance", self, value) is True


def _elements(iterator: Iterator, length: int | None) -> Iterator:
    count = 0
    while True:
        try:
            element = next(iterator)
        except StopIteration:
            break
        count += 1
        yield element
    if length not in (None, count):
        raise TypeError(f"an object of length {length} has {count} elements")


def _of_remotes(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.ask(name, self, *args)


def _between_remotes(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._peer.ask(name, self, other) if type(other) is Remote else NotImplemented


for _name in _OF_REMOTES:
    setattr(Remote, f"__{_name}__", _of_remotes(_name))
for _name in _BETWEEN_REMOTES:
    setattr(Remote, f"__{_name.strip('_')}__", _between_remotes(_name))


class Peer:
    """One end of the connection, a stream socket with one JSON message per line."""

    def __init__(self, fd: int, own_module: str | None = None) -> None:
        """own_module: set at the trusted end only. The other end reaches functions and classes of that module, their instances
        and iterators, and no attribute whose name starts with an underscore.
        """
        sys.set_int_max_str_digits(0)  # integers travel as text and may be long
        self._fd = fd
        self._lines = open(fd, "rb", closefd=False)  # noqa: SIM115  open as long as the process lives
        self._own_module = own_module
        # Objects of this end by handle, and handles by id: an object keeps its handle, and is kept alive, so ids stay unique.
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        # Proxies by handle of the other end: one proxy per object, so that ``is`` works.
        self._remotes: dict[int, Remote] = {}
        self._exceptions: dict[str, type[BaseException]] = {}

    def serve(self, names: Callable[[str], Any]) -> NoReturn:
        """Execute requests until the other end disconnects. names: resolves a name to an object; raises NameError."""
        self._handle(names)  # gets handle 0, see look_up
        while True:
            self._answer(*self._receive()[1:])

    def look_up(self, name: str) -> Any:
        """The object of this name at the serving end, copied or as a Remote."""
        return self.ask("call", Remote(self, 0), name)

    def ask(self, operation: str, subject: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation at the other end; return its result or raise its exception here."""
        given = [*args, *kwargs.values()]
        self._send(["ask", operation, self._encode(subject), [self._encode(value) for value in given], [*kwargs]])
        # The other end may call back before it replies: a key function, or an iterator that it was given.
        while (message := self._receive())[0] == "ask":
            self._answer(*message[1:])
        try:
            kind, result, *states = message
            result, states = self._decode(result), [self._decode(state) for state in states]
            assert kind == "return" or (kind == "raise" and isinstance(result, BaseException)), kind
        except Exception as error:  # the message was not written by this module
            _leave(error)
        if kind == "raise":
            # An exception that ends loops must not come out of a call: all(map(candidate, ...)) would stop early and hold.
            if isinstance(result, StopIteration | StopAsyncIteration | GeneratorExit) and operation != "next":
                raise RuntimeError(f"{type(result).__name__} was raised")
            raise result
        if result is None:  # checked here as well as in _answer, which may run in the program's process
            for value, state in zip(given, states, strict=False):
                _set_state(value, state)
        return result

    def _answer(self, operation: str, subject: Any, args: list, keywords: list[str]) -> None:
        """Execute one request of the other end and send the reply."""
        try:
            subject, given = self._decode(subject), [self._decode(value) for value in args]
            if self._own_module is not None and not self._may(operation, subject, given):
                raise TypeError(f"{operation}: not available to the program")
            split = len(given) - len(keywords)
            result = _OPERATIONS[operation](subject, *given[:split], **dict(zip(keywords, given[split:], strict=True)))
            # Modified arguments are sent back only for functions that return None, which work in place. Otherwise a program that
            # empties its argument and returns [] would pass f(x) == sorted(x).
            reply = ["return", self._encode(result), *([self._encode(value) for value in given] if result is None else [])]
        except BaseException as error:  # any exception of the operation belongs to the caller
            reply = ["raise", self._encode(error)]
        self._send(reply)

    def _may(self, operation: str, subject: Any, args: list) -> bool:
        """Whether the untrusted end may perform the operation on an object of this end."""
        if isinstance(subject, FunctionType | MethodType | type):
            return operation == "call" and self._is_own(subject)
        if isinstance(subject, Iterator):
            return operation in ("iter", "next")
        if operation in ("getattr", "setattr") and (type(args[0]) is not str or args[0].startswith("_")):
            return False
        if operation == "setattr" and callable(getattr(type(subject), args[0], None)):  # would replace a method of assertions
            return False
        return self._is_own(subject)

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
        """Encode a value as a scalar or [tag, parts]."""
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
        if self._own_module is None and isinstance(value, tuple) and (fields := getattr(kind, "_fields", None)):
            return ["named tuple", [["list", [kind.__name__, *fields]], *(self._encode(part) for part in value)]]
        if self._own_module is None and isinstance(value, Enum | tuple) and isinstance(value, int | str | tuple):
            return self._encode(_base_value(value))
        if self._own_module is not None and not self._is_own(value):
            if isinstance(value, BuiltinFunctionType | MethodDescriptorType | FunctionType | type):
                home = value.__objclass__ if isinstance(value, MethodDescriptorType) else value
                return ["known", [home.__module__, value.__qualname__]]
            raise TypeError(f"a program cannot be given a {kind.__name__}")
        return ["mine", [self._handle(value)]]

    def _handle(self, value: Any) -> int:
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._handles[id(value)]

    def _decode(self, value: Any) -> Any:
        """Decode a value that may be hostile: each tag accepts parts of certain types only, anything else raises."""
        if type(value) in _SCALARS:
            return value
        assert type(value) is list, value
        tag, parts = value
        assert type(tag) is str and type(parts) is list, value
        if not _SCALARS.issuperset(map(type, parts)):
            parts = [self._decode(part) for part in parts]
        if tag in _MAKE:
            make, allowed = _MAKE[tag]
            assert allowed is None or allowed.issuperset(map(type, parts)), value
            return make(parts)
        if tag == "exception":
            kind, *arguments = parts
            # __new__ without __init__: constructors of exceptions may require other arguments than args.
            error = _exception_class(kind).__new__(kind, *arguments)
            error.args = tuple(arguments)
            return error
        if tag == "named tuple":
            names, *values = parts
            assert type(names) is list and _TEXT.issuperset(map(type, names)), value
            return _named_tuple(*names)(*values)
        if tag == "array":
            return _array(*parts)
        if tag == "known" and self._own_module is None:
            return operator.attrgetter(parts[1])(import_module(parts[0]))
        first, *others = parts
        if tag in ("mine", "yours"):
            assert type(first) is int and first >= 0 and not others, value
            return self._objects[first] if tag == "yours" else self._remotes.setdefault(first, Remote(self, first))
        assert type(first) is str, value
        if tag == "class":
            kind = vars(builtins)[first]
            assert isinstance(kind, type) and not others, value
            return kind
        assert tag == "exception class", value
        (base,) = others
        return self._exceptions.setdefault(first, type(first, (_exception_class(base),), {}))


@cache
def _named_tuple(name: str, *fields: str) -> type[tuple]:
    return namedtuple(name, fields)  # raises for invalid and private names


def _exception_class(value: Any) -> type[BaseException]:
    assert isinstance(value, type) and issubclass(value, BaseException), value
    return value


def _base_value(value: Any) -> Any:
    """The plain value that equals an IntEnum, a StrEnum or an instance of a subclass of tuple."""
    if isinstance(value, int):
        return int(value)
    return str.__str__(value) if isinstance(value, str) else tuple(value)


def _array_parts(value: Any) -> list | None:
    """dtype and nested list of a NumPy array or scalar; None for other NumPy objects."""
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in _ARRAY_KINDS:
        return [value.dtype.str, value.tolist()]
    return None


def _array(dtype: str, values: Any) -> Any:
    import numpy

    assert type(dtype) is str and numpy.dtype(dtype).kind in _ARRAY_KINDS, dtype
    assert _are_elements(values), values
    return numpy.array(values, dtype)[()]  # [()] turns an array without dimensions into a scalar


def _are_elements(values: Any) -> bool:
    return all(map(_are_elements, values)) if type(values) is list else type(values) in (bool, int, float, complex, str)


def _set_state(value: Any, state: Any) -> None:
    """Update a mutable argument to its contents at the other end; objects of this end's classes were modified in place."""
    if type(value) in (list, bytearray, deque) and type(state) is type(value):
        value.clear()
        value.extend(state)
    elif (type(value) is set and type(state) is set) or (
        type(value) in (dict, defaultdict, OrderedDict, Counter) and isinstance(state, dict)
    ):
        value.clear()
        value.update(state)


def _leave(error: Exception) -> NoReturn:
    """End the process after a protocol error. Not by an exception, which assertions might catch and pass."""
    os.write(2, f"{error!r}\n".encode())
    os._exit(1)
