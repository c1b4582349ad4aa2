"""Eviction of experts, and the hit rate of a rule.

A pass accesses the layers in order and asks each for some experts. Least recently used would be the
worst rule here if the cache has less than one pass asks for: it evicts exactly what the next layers
used last time. So age is counted in accesses of an expert's own layer, and combined with how often
it was asked for before: each use counts 1, and decays with every access of its layer. Among equals,
the expert that will not be asked for again for the longest is evicted, which is that of the layer
accessed last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from offload.trace import ROUTED, Trace, record_since

_RETAINED = 0.9
"""Decay of a use's score per access of its layer. A cache of a sixth of the embedded mixture's
experts has, on one recording, 64 % of those asked for with 0.8, 65 % with 0.9 and with 0.95, 61 %
with 0.99; recency has 60 %, the best rule 80 %."""


class Slots:
    """State of the expert in each slot; all arrays are [slots]."""

    def __init__(self, n_slots: int) -> None:
        self.layer = np.full(n_slots, -1)
        """Layer of the expert; -1: the slot is free."""
        self.expert = np.zeros(n_slots, dtype=np.int64)
        self.used_at = np.zeros(n_slots, dtype=np.int64)
        """Time of the last use, counted in accesses of all layers."""
        self.n_missed = np.zeros(n_slots, dtype=np.int64)
        """Accesses of its own layer since it was used."""
        self.n_visits = np.ones(n_slots, dtype=np.int64)
        """Accesses of its own layer."""
        self.score = np.zeros(n_slots)
        """Score of its uses, at the time of the last one."""


Rule = Callable[[Slots], NDArray[np.float64]]
"""A function that scores every slot [slots]: the lowest is evicted."""


def least_recently_used(slots: Slots) -> NDArray[np.float64]:
    """Score by the time of the last use, for all layers alike."""
    return slots.used_at.astype(np.float64)


def decayed_uses(slots: Slots) -> NDArray[np.float64]:
    """Score by decayed uses, relative to an expert used in every access: so that layers which this
    pass has already accessed compare with those that it has not."""
    return slots.score * _RETAINED**slots.n_missed / (1.0 - _RETAINED**slots.n_visits)


class ExpertIndex:
    """The index of the expert cache: which expert is in which of `n_slots` slots."""

    def __init__(self, n_slots: int, rule: Rule = decayed_uses) -> None:
        if n_slots < 1:
            raise ValueError(f"a cache of experts needs at least one slot, not {n_slots}")
        self._slots = Slots(n_slots)
        self._free = list(range(n_slots))[::-1]
        self._rule = rule
        self._slot_of: dict[tuple[int, int], int] = {}
        self._uses: dict[tuple[int, int], tuple[float, int]] = {}
        """Score of each expert at its last use, and the number of that access of its layer."""
        self._visits: defaultdict[int, int] = defaultdict(int)
        self._now = 0

    @property
    def is_full(self) -> bool:
        return not self._free

    def access(self, layer: int) -> None:
        """Count an access of a layer; its experts are used at this time."""
        self._now += 1
        self._visits[layer] += 1
        is_here = self._slots.layer == layer
        self._slots.n_missed[is_here] += 1
        self._slots.n_visits[is_here] += 1

    def has(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._slot_of

    def find(self, layer: int, expert: int) -> int | None:
        """Return the expert's slot, and mark it as used; None if it is not cached."""
        slot = self._slot_of.get((layer, expert))
        if slot is not None:
            self._use(layer, expert, slot)
        return slot

    def admit(self, layer: int, expert: int, cached: Collection[int]) -> int | None:
        """Return a slot for an expert that is not cached; another one may be evicted.

        cached: experts of this layer that must stay. None if they occupy all slots.
        """
        if not self._free and self.evict({layer: cached}) is None:
            return None
        slot = self._free.pop()
        self._slot_of[layer, expert] = slot
        self._slots.layer[slot], self._slots.expert[slot] = layer, expert
        self._use(layer, expert, slot)
        return slot

    def forget(self, layer: int, expert: int) -> None:
        """Free the slot of an expert."""
        slot = self._slot_of.pop((layer, expert))
        self._slots.layer[slot] = -1
        self._free.append(slot)

    def _use(self, layer: int, expert: int, slot: int) -> None:
        access = self._visits[layer]
        score, before = self._uses.get((layer, expert), (0.0, -1))
        if access != before:  # one that was prefetched for this access is used once
            score = 1.0 + score * _RETAINED ** (access - before)
        self._uses[layer, expert] = score, access
        slots = self._slots
        slots.score[slot], slots.used_at[slot] = score, self._now
        slots.n_missed[slot], slots.n_visits[slot] = 0, access

    def evict(self, cached: Mapping[int, Collection[int]]) -> tuple[int, int] | None:
        """Free the slot of the expert with the lowest score; return (its layer, the expert), or
        None if all of them must stay: `cached`, by layer."""
        slots = self._slots
        may_go = slots.layer >= 0
        for layer, experts in cached.items():
            may_go &= (slots.layer != layer) | ~np.isin(slots.expert, list(experts))
        if not may_go.any():
            return None
        score = np.where(may_go, self._rule(slots), np.inf)
        lowest = score <= score.min() * (1 + 1e-9)
        victim = int(np.where(lowest, slots.used_at, -1).argmax())
        result = int(slots.layer[victim]), int(slots.expert[victim])
        self.forget(*result)
        return result


Access = tuple[int, tuple[int, ...]]
"""(layer, experts that a pass asked it for)"""


def record_access(layer: int, experts: Collection[int]) -> None:
    """Record an access for `visits_of`."""
    record_since(perf_counter(), ROUTED, " ".join(map(str, (layer, *sorted(experts)))))


def visits_of(trace: Trace) -> list[Access]:
    """Return the accesses of a recording, which must be of one mixture."""
    names = (event.name.split() for event in trace.events if event.kind == ROUTED)
    return [(int(layer), tuple(map(int, experts))) for layer, *experts in names]


def replay(
    trace: Iterable[Access], n_slots: int, rule: Rule = decayed_uses, limit: int | None = None
) -> float:
    """Return the share of the experts asked for that a cache with this rule hits.

    limit: count only accesses of at most so many experts: a prompt's go through the cache, too.
    """
    directory = ExpertIndex(n_slots, rule)
    n_hits = n_asked = 0
    for layer, experts in trace:
        directory.access(layer)
        missing = [expert for expert in experts if directory.find(layer, expert) is None]
        if limit is None or len(experts) <= limit:
            n_asked += len(experts)
            n_hits += len(experts) - len(missing)
        for expert in missing:
            if directory.admit(layer, expert, experts) is None:  # more than there are slots
                directory.admit(layer, expert, ())
    return n_hits / max(1, n_asked)


def belady(trace: Sequence[Access], n_slots: int, limit: int | None = None) -> float:
    """Return the same for the optimal rule, which knows the future accesses (Belady 1966): it
    evicts what is not needed again for the longest."""
    asked: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for time, (layer, experts) in enumerate(trace):
        for expert in experts:
            asked[layer, expert].append(time)
    cached: set[tuple[int, int]] = set()
    n_hits = n_asked = 0

    def next_use(key: tuple[int, int], now: int) -> float:
        times = asked[key]
        i = bisect_left(times, now + 1)
        return times[i] if i < len(times) else float("inf")

    for time, (layer, experts) in enumerate(trace):
        keys = [(layer, expert) for expert in experts]
        if limit is None or len(experts) <= limit:
            n_asked += len(keys)
            n_hits += sum(key in cached for key in keys)
        candidates = cached | set(keys)
        n_over = len(candidates) - n_slots
        if n_over > 0:
            by_use = sorted(candidates, key=lambda key: (-next_use(key, time), key))
            candidates -= set(by_use[:n_over])
        cached = candidates
    return n_hits / max(1, n_asked)
