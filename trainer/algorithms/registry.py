"""A name in the config to the function it means: one of ours, or one from the user's file."""

import difflib
from collections.abc import Callable, Iterator, Set
from typing import Any, Generic, TypeVar, cast

from trainer.user_code import load_function

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(Generic[Function]):
    def __init__(self, key: str) -> None:
        """key: the configuration key whose value is looked up here; errors name it."""
        self.key = key
        self._entries: dict[str, Function] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._prepare: dict[str, Callable[..., Any]] = {}

    def register(
        self, name: str, *, needs: Set[str] = frozenset(), prepare: Callable[..., Any] | None = None
    ) -> Callable[[Function], Function]:
        """Decorator. needs: columns the function reads beyond what every one gets. prepare: runs before it, once over a
        whole mini-batch, where a kind of function has such a step. A taken name raises.
        """

        def add(function: Function) -> Function:
            if name in self._entries:
                raise ValueError(f"{self.key}={name} is taken by {self._entries[name].__module__}:{self._entries[name].__name__}")
            self._entries[name] = function
            self._needs[name] = frozenset(needs)
            if prepare is not None:
                self._prepare[name] = prepare
            return function

        return add

    def __getitem__(self, name: str) -> Function:
        """``name``, or ``file.py:function``: a function of the user's, plain or registered in its file under any name."""
        return self._entries[self._known(name)]

    def needs(self, name: str) -> frozenset[str]:
        return self._needs[self._known(name)]

    def prepare(self, name: str) -> Callable[..., Any] | None:
        return self._prepare.get(self._known(name))

    def __iter__(self) -> Iterator[str]:
        """The registered names; a function that was only found in a file has none."""
        return iter(sorted(name for name in self._entries if ".py:" not in name))

    def _known(self, name: str) -> str:
        """The name it is registered under. Raises ValueError."""
        path, colon, function_name = name.rpartition(":")
        if colon and path.endswith(".py") and name not in self._entries:
            function = load_function(path, function_name, f"{self.key}={name}")
            own = next((entry for entry, known in self._entries.items() if known is function), None)
            if own is not None:
                return own
            self.register(name)(cast(Function, function))
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{self.key}={name} is not known{hint}; known: {', '.join(self)}, or FILE.py:FUNCTION of your own")
        return name
