"""Registries that resolve a configuration value to a function: a built-in one or FILE.py:FUNCTION of the user."""

import difflib
import inspect
from collections.abc import Callable, Iterator, Set
from typing import Any, Generic, TypeVar, cast

from trainer.run.user_code import load_function

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(Generic[Function]):
    """Functions of (inputs, config) by name, with their required inputs and optional ``prepare`` step."""

    def __init__(self, key: str) -> None:
        """key: the configuration key whose values are looked up; used in error messages."""
        self.key = key
        self._entries: dict[str, Function] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._prepare: dict[str, Callable[..., Any]] = {}

    def register(
        self, name: str, *, needs: Set[str] = frozenset(), prepare: Callable[..., Any] | None = None
    ) -> Callable[[Function], Function]:
        """Register the decorated function under ``name``.

        needs: columns that it reads beyond those every function gets. prepare: step that runs before it, once over the whole
        mini-batch. Raises ValueError if the name is registered already.
        """

        def add(function: Function) -> Function:
            if name in self._entries:
                owner = self._entries[name]
                raise ValueError(f"{self.key}={name} is already registered by {owner.__module__}:{owner.__name__}")
            self._entries[name] = function
            self._needs[name] = frozenset(needs)
            if prepare is not None:
                self._prepare[name] = prepare
            return function

        return add

    def __getitem__(self, name: str) -> Function:
        """The function registered as ``name``, or the user's ``file.py:function``. Raises ValueError."""
        return self._entries[self._known(name)]

    def needs(self, name: str) -> frozenset[str]:
        return self._needs[self._known(name)]

    def prepare(self, name: str) -> Callable[..., Any] | None:
        return self._prepare.get(self._known(name))

    def __iter__(self) -> Iterator[str]:
        """Registered names, without the ``file.py:function`` entries."""
        return iter(sorted(name for name in self._entries if ".py:" not in name))

    def _known(self, name: str) -> str:
        """The name under which ``name`` is registered, loading a user's file if necessary. Raises ValueError."""
        path, colon, function_name = name.rpartition(":")
        if colon and path.endswith(".py") and name not in self._entries:
            function = load_function(path, function_name, f"{self.key}={name}")
            try:
                inspect.signature(function).bind(None, None)
            except TypeError as error:
                signature = f"{function_name}{inspect.signature(function)}"
                raise ValueError(f"{self.key}={name}: {signature} must take two arguments, (inputs, config): {error}") from error
            # The file may have registered the function with a decorator on import: that entry has its needs and prepare step.
            own = next((entry for entry, known in self._entries.items() if known is function), None)
            if own is not None:
                return own
            self.register(name)(cast(Function, function))
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{self.key}={name} is not known{hint}; known: {', '.join(self)}, or FILE.py:FUNCTION of your own")
        return name
