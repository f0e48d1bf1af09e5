"""A name in the config to the function it means."""

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


class Registry(Generic[Function]):
    def __init__(self, key: str) -> None:
        """key: the configuration key whose value is looked up here; errors name it."""
        self.key = key
        self._entries: dict[str, Function] = {}
        self._needs: dict[str, frozenset[str]] = {}

    def register(self, name: str, *, needs: frozenset[str] = frozenset()) -> Callable[[Function], Function]:
        """Decorator. needs: columns the function reads beyond what every one gets. A taken name raises."""

        def add(function: Function) -> Function:
            if name in self._entries:
                raise ValueError(f"{self.key}={name} is taken by {self._entries[name].__module__}:{self._entries[name].__name__}")
            self._entries[name] = function
            self._needs[name] = needs
            return function

        return add

    def __getitem__(self, name: str) -> Function:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{self.key}={name} is not known{hint}; known: {', '.join(self)}")
        return self._entries[name]

    def needs(self, name: str) -> frozenset[str]:
        self[name]
        return self._needs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
