"""Mistakes in the ring's states: random orders of reads, uses and restarts catch every one."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from mutants import mutated
from ring_simulation import RingSimulation

from offload.ring import slots

MISTAKES = {
    "the result of an old read counts": ("if work.generation != self._generation:", "if False:"),
    "a slot is filled while an old read runs": (
        "slot.state is SlotState.FREE and slot.n_in_flight == 0",
        "slot.state is SlotState.FREE",
    ),
    "a restart keeps the generation": (
        "self._generation += 1\n            self._ticket",
        "self._ticket",
    ),
    "a restart goes on where it was": ("self._ticket, self._n_taken = ticket, 0", "pass"),
    "a restart keeps what was read": (
        "            for slot in self.slots:\n                self._free(slot)",
        "            pass",
    ),
    "a restart forgets no error": (
        "self._error = None\n            for",
        "pass\n            for",
    ),
    "a piece is missing": ("if slot.n_missing == 0:", "if slot.n_missing <= 1:"),
    "an error comes before its turn": (
        "self._error is not None and self._error[0] <= ticket",
        "self._error is not None",
    ),
    "an error counts as read": ("elif error is None:", "elif True:"),
    "a slot in use is filled": (
        "return slot.state is SlotState.FREE and",
        "return slot.state is not SlotState.READY and",
    ),
    "a slot that is ready is filled": (
        "return slot.state is SlotState.FREE and",
        "return slot.state is not SlotState.IN_USE and",
    ),
    "the first piece again": ("pieces[self._n_taken]", "pieces[0]"),
    "a layer of one piece too few": (
        "if self._n_taken == len(pieces):",
        "if self._n_taken >= max(1, len(pieces) - 1):",
    ),
    "what is given back stays": ("slot.ticket, slot.state = -1, SlotState.FREE", "pass"),
}


def is_right(module: ModuleType) -> bool:
    """Whether every layer comes, as it was read."""
    for seed in range(150):
        simulation = RingSimulation(random.Random(seed), module)
        try:
            simulation.run(80)
            simulation.drain()
        except (AssertionError, IndexError, OSError, RuntimeError, pytest.fail.Exception):
            return False
        finally:
            simulation.close()
    return True


def test_without_a_mistake_it_is_right() -> None:
    assert is_right(slots)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_ring_is_caught(name: str) -> None:
    assert not is_right(mutated(slots, *MISTAKES[name]))
