"""What was made of constraints, for those that come again: a client's may be as long as a body."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

MAX_CHARACTERS = 2 << 20
_T = TypeVar("_T")


class HasText(Hashable, Protocol):
    """A constraint, by what is asked of it here."""

    @property
    def text(self) -> str: ...


class Cached(Generic[_T]):
    """`lru_cache(most)` of a function of a constraint and of other things, which keeps
    MOST_CHARACTERS of sequences at most.

    One text may be longer: it is asked for several times by its request, and others go for it. For
    any thread.
    """

    def __init__(self, make: Callable[..., _T], limit: int) -> None:
        self._make, self._limit = make, limit
        self._values: OrderedDict[tuple[HasText, tuple[Hashable, ...]], _T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, constraint: HasText, *rest: Hashable) -> _T:
        """Raises what making it raises, which is not kept."""
        key = (constraint, rest)
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = self._make(constraint, *rest)
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
