"""Cache of values computed from constraints, which may be as long as a request's body."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

MAX_CHARACTERS = 2 << 20
_T = TypeVar("_T")


class HasText(Hashable, Protocol):
    """Protocol of a constraint with a text."""

    @property
    def text(self) -> str: ...


class Cached(Generic[_T]):
    """LRU cache of a function of a constraint and other arguments, limited to `limit` entries and
    MAX_CHARACTERS of constraint texts.

    One longer text is cached alone, as its request needs it several times. Thread-safe.
    """

    def __init__(self, make: Callable[..., _T], limit: int) -> None:
        self._make, self._limit = make, limit
        self._values: OrderedDict[tuple[HasText, tuple[Hashable, ...]], _T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, constraint: HasText, *arguments: Hashable) -> _T:
        """Return the cached or computed value. Errors of the computation are not cached."""
        key = (constraint, arguments)
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = self._make(constraint, *arguments)
        with self._lock:
            self._values[key] = value
            while len(self) > self._limit or (len(self) > 1 and self._characters > MAX_CHARACTERS):
                self._values.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._values)

    @property
    def _characters(self) -> int:
        return sum(len(constraint.text) for constraint, _ in self._values)
