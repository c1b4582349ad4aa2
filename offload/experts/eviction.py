"""Which expert makes room for another, and how often a rule finds what is asked for.

A pass visits the layers in order and asks each for some experts. Least recently used would be the
worst rule here where the cache holds less than one pass asks for: it gives away exactly what the
next layers had last time. So age is counted in visits of an expert's own layer: what its layer did
without for the most visits goes first, and among equals what will not be asked for again for the
longest, which is that of the layer that was visited last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Oldest(NamedTuple):
    """The least recently used expert of a layer."""

    layer: int
    expert: int
    used_at: int
    """Counted in visits of all layers."""
    n_missed: int
    """Visits of its own layer since then."""


Rule = Callable[[Sequence[Oldest], int], Oldest]
"""(the oldest expert of each layer, layers that were visited) -> the one that makes room."""


def least_recently_used(oldest: Sequence[Oldest], now: int) -> Oldest:
    """Of all layers alike."""
    return min(oldest, key=lambda one: one.used_at)


def most_visits_missed(oldest: Sequence[Oldest], now: int) -> Oldest:
    """See the module."""
    return max(oldest, key=lambda one: (one.n_missed, one.used_at))


@dataclass
class _Use:
    slot: int
    used_at: int
    visit: int


class Directory:
    """Which expert is in which of `n_slots` slots."""

    def __init__(self, n_slots: int, rule: Rule = most_visits_missed) -> None:
        if n_slots < 1:
            raise ValueError(f"a cache of experts needs at least one slot, not {n_slots}")
        self._free = list(range(n_slots))[::-1]
        self._rule = rule
        self._uses: defaultdict[int, OrderedDict[int, _Use]] = defaultdict(OrderedDict)
        """By layer and expert, the least recently used first."""
        self._visits: defaultdict[int, int] = defaultdict(int)
        self._now = 0

    def visit(self, layer: int) -> None:
        """A pass has come to a layer: what it uses from now on is used now."""
        self._now += 1
        self._visits[layer] += 1

    def find(self, layer: int, expert: int) -> int | None:
        """Its slot, and it is used now; None where it is in none."""
        use = self._uses[layer].get(expert)
        if use is None:
            return None
        use.used_at, use.visit = self._now, self._visits[layer]
        self._uses[layer].move_to_end(expert)
        return use.slot

    def admit(self, layer: int, expert: int, kept: Container[int]) -> int | None:
        """A slot for an expert that is in none; another one may have to go.

        kept: experts of this layer that must not. None where all slots hold such.
        """
        if not self._free:
            oldest = [x for x in (self._oldest(i, layer, kept) for i in self._uses) if x]
            if not oldest:
                return None
            victim = self._rule(oldest, self._now)
            self.forget(victim.layer, victim.expert)
        slot = self._free.pop()
        self._uses[layer][expert] = _Use(slot, self._now, self._visits[layer])
        return slot

    def forget(self, layer: int, expert: int) -> None:
        """What is in its slot is of no use any more."""
        self._free.append(self._uses[layer].pop(expert).slot)

    def _oldest(self, layer: int, now: int, kept: Container[int]) -> Oldest | None:
        for expert, use in self._uses[layer].items():
            if layer != now or expert not in kept:
                n_missed = self._visits[layer] - use.visit
                return Oldest(layer, expert, use.used_at, n_missed)
        return None


Visit = tuple[int, tuple[int, ...]]
"""(layer, experts that a pass asked it for)"""


def replay(trace: Iterable[Visit], n_slots: int, rule: Rule = most_visits_missed) -> float:
    """Share of the experts asked for that a cache of this rule has."""
    directory = Directory(n_slots, rule)
    n_hits = n_asked = 0
    for layer, experts in trace:
        directory.visit(layer)
        missing = [expert for expert in experts if directory.find(layer, expert) is None]
        n_asked += len(experts)
        n_hits += len(experts) - len(missing)
        for expert in missing:
            if directory.admit(layer, expert, experts) is None:  # more than there are slots
                directory.admit(layer, expert, ())
    return n_hits / max(1, n_asked)


def belady(trace: Sequence[Visit], n_slots: int) -> float:
    """The same of the best that any rule could do, which knows what will be asked for
    (Belady 1966): out goes what is not needed again for the longest."""
    asked: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for time, (layer, experts) in enumerate(trace):
        for expert in experts:
            asked[layer, expert].append(time)
    held: set[tuple[int, int]] = set()
    n_hits = n_asked = 0

    def next_use(key: tuple[int, int], now: int) -> float:
        times = asked[key]
        i = bisect_left(times, now + 1)
        return times[i] if i < len(times) else float("inf")

    for time, (layer, experts) in enumerate(trace):
        keys = [(layer, expert) for expert in experts]
        n_asked += len(keys)
        n_hits += sum(key in held for key in keys)
        wanted = held | set(keys)
        n_over = len(wanted) - n_slots
        if n_over > 0:
            by_use = sorted(wanted, key=lambda key: (-next_use(key, time), key))
            wanted -= set(by_use[:n_over])
        held = wanted
    return n_hits / max(1, n_asked)
