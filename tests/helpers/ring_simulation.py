"""The ring's states, driven step by step in one thread, in random orders."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

from offload.ring import slots as ring_slots
from offload.storage.aligned import AlignedBuffer
from offload.storage.layout import ReadChunk

BLOCK = 64  # the ring does not need alignment: small chunks keep the simulation fast


def read_chunk(number: int) -> ReadChunk:
    return ReadChunk(Path("x"), 0, number * BLOCK, BLOCK, BLOCK)


class RingSimulation:
    """Readers and a consumer that alternate at random; contents name their read and chunk."""

    def __init__(self, rng: random.Random, slots: ModuleType = ring_slots) -> None:
        """Take the ring's module, or one with a mistake, as `slots`."""
        self.rng, self.slots = rng, slots
        self.n_layers = rng.randint(1, 16)
        self.n_pieces = [rng.randint(1, 4) for _ in range(self.n_layers)]
        n_slots = rng.randint(1, min(16, self.n_layers))
        self.ring = slots.SlotRing(
            [AlignedBuffer(4 * BLOCK) for _ in range(n_slots)],
            lambda read_number: [
                read_chunk(i) for i in range(self.n_pieces[read_number % self.n_layers])
            ],
            poison=slots.poison_memory,
        )
        self.running: list[ring_slots.Work] = []
        self.read_number = 0
        self.n_consumed = 0
        self.failed: set[int] = set()  # read sequence numbers, since the last restart

    def content(self, read_number: int, number: int) -> bytes:
        return (f"{read_number}/{number};" * BLOCK).encode()[:BLOCK]

    def begin_read(self) -> None:
        if len(self.running) < 5:
            work = self.ring.acquire_for_read(wait=False)
            if work is not None:
                self.running.append(work)

    def end_read(self, *, fail: bool = False) -> None:
        if not self.running:
            return
        work = self.running.pop(self.rng.randrange(len(self.running)))
        if fail:
            if work.read_number >= self.read_number:
                self.failed.add(work.read_number)
            self.ring.publish(work, error=OSError(f"read of {work.read_number}"))
            return
        number = work.read_chunk.buffer_offset // BLOCK
        view = work.slot.buffer.view[work.read_chunk.buffer_offset :][:BLOCK]
        view[:] = self.content(work.read_number, number)
        self.ring.publish(work, BLOCK)

    def consume(self) -> None:
        slot = self.ring.slots[self.read_number % len(self.ring.slots)]
        is_ready = slot.state is self.slots.SlotState.READY and slot.read_number == self.read_number
        if not is_ready and self.read_number not in self.failed:
            return  # it would wait
        if not is_ready:
            with pytest.raises(OSError, match=f"read of {self.read_number}"):
                self.ring.wait_ready(self.read_number)
            self.restart()
            return
        taken = self.ring.wait_ready(self.read_number)
        for _ in range(self.rng.randint(0, 6)):  # the readers go on while the layer is used
            self.rng.choice([self.begin_read, self.end_read])()
        for number in range(self.n_pieces[self.read_number % self.n_layers]):
            actual = bytes(taken.buffer.view[number * BLOCK :][:BLOCK])
            assert actual == self.content(self.read_number, number)
        self.ring.release(taken, self.read_number)
        assert set(bytes(taken.buffer.view)) == {0xFF}
        self.read_number += 1
        self.n_consumed += 1

    def restart(self) -> None:
        self.read_number += 3 * self.n_layers + self.rng.randrange(self.n_layers)
        self.failed.clear()
        self.ring.restart(self.read_number)

    def run(self, n_events: int) -> int:
        """Return the layers consumed. Raise AssertionError if one differs from its read."""
        for _ in range(n_events):
            event = self.rng.random()
            if event < 0.35:
                self.begin_read()
            elif event < 0.7:
                self.end_read()
            elif event < 0.97:
                self.consume()
            elif event < 0.985:
                self.end_read(fail=True)
            else:
                self.restart()
        return self.n_consumed

    def drain(self) -> None:
        """Drain the ring. Raise AssertionError if the wanted layer does not arrive."""
        n_before = self.n_consumed
        for _ in range(25):
            self.begin_read()
            self.end_read()
            self.consume()
        assert self.n_consumed > n_before

    def close(self) -> None:
        self.ring.free_buffers()
