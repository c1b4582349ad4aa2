"""BlockSlots: which blocks of some memory are in use, and which take memory."""

from __future__ import annotations

import heapq

import numpy as np


class BlockSlots:
    """Numbers 0 .. n - 1 of blocks; low ones are taken first, so that runs are long."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._given_back: list[int] = []
        self._released: list[int] = []  # of unused ones, those that take no memory
        self._n_begun = 0
        """Slots that were ever in use."""

    @property
    def n_free(self) -> int:
        """Unused slots."""
        return self.n_slots - self.n_touched + len(self._given_back)

    @property
    def n_used(self) -> int:
        return self.n_slots - self.n_free

    @property
    def n_touched(self) -> int:
        """Slots that take memory: those in use, and those that were since the last release."""
        return self._n_begun - len(self._released)

    @property
    def n_unreleased(self) -> int:
        """Unused slots that take memory."""
        return len(self._given_back)

    def take(self) -> int:
        """Return an unused slot, one that takes memory already if there is one.

        At least one must be free.
        """
        for heap in (self._given_back, self._released):
            if heap:
                return heapq.heappop(heap)
        assert self._n_begun < self.n_slots, "a slot is free"
        self._n_begun += 1
        return self._n_begun - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._given_back, slot)

    def release(self) -> list[tuple[int, int]]:
        """Note that unused slots take no memory any more; return (first, number) of their runs."""
        slots = np.array(sorted(self._given_back), dtype=np.int64)
        self._released = sorted([*self._released, *self._given_back])
        self._given_back = []
        if not len(slots):
            return []
        runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
        return [(int(run[0]), len(run)) for run in runs]

    def clear(self) -> None:
        """Note that no slot is in use or takes memory."""
        self._given_back.clear()
        self._released.clear()
        self._n_begun = 0
