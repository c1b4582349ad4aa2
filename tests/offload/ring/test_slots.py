"""The ring's states, driven step by step in one thread, in thousands of random orders."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from ring_simulation import BLOCK, RingSimulation, read_chunk

from offload.ring.slots import SlotRing, SlotState, StreamerClosed, Work
from offload.storage.aligned import AlignedBuffer


@pytest.mark.slow
def test_no_order_of_events_shows_stale_content() -> None:
    n_consumed, n_seeds = 0, 3000
    for seed in range(n_seeds):
        simulation = RingSimulation(random.Random(seed))
        n_consumed += simulation.run(80)
        simulation.close()
    assert n_consumed > 3 * n_seeds


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    ring = SlotRing(
        [AlignedBuffer(2 * BLOCK) for _ in range(2)],
        lambda read_number: [read_chunk(0), read_chunk(1)],
    )
    yield ring
    ring.free_buffers()


def take(ring: SlotRing) -> Work:
    work = ring.acquire_for_read(wait=False)
    assert work is not None
    return work


def fill(ring: SlotRing) -> None:
    ring.publish(take(ring), BLOCK)
    ring.publish(take(ring), BLOCK)


def test_readers_go_on_to_the_next_layer_without_a_barrier(ring: SlotRing) -> None:
    works = [take(ring) for _ in range(4)]
    assert [(w.read_number, w.slot.index) for w in works] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert ring.acquire_for_read(wait=False) is None  # all slots are taken
    for work in works[2:]:
        ring.publish(work, BLOCK)  # layer 1 arrives first
    ring.publish(works[0], BLOCK)
    assert ring.slots[0].state is SlotState.READING
    ring.publish(works[1], BLOCK)
    for read_number in (0, 1):
        ring.release(ring.wait_ready(read_number), read_number)
    assert take(ring).read_number == 2


def test_a_restart_waits_for_old_reads_into_the_slot(ring: SlotRing) -> None:
    old = take(ring)
    ring.restart(10)  # read 10 needs the slot that `old` still writes to
    assert ring.acquire_for_read(wait=False) is None
    ring.publish(old, BLOCK)
    assert ring.slots[0].state is SlotState.FREE  # the old chunk does not count
    fill(ring)
    assert ring.wait_ready(10).read_number == 10


def test_an_error_of_an_old_read_is_forgotten(ring: SlotRing) -> None:
    old = take(ring)
    ring.restart(10)
    ring.publish(old, error=OSError("old"))
    fill(ring)
    assert ring.wait_ready(10).read_number == 10


def test_the_earliest_error_comes_in_its_turn(ring: SlotRing) -> None:
    works = [take(ring) for _ in range(4)]
    ring.publish(works[2], error=OSError("of layer 1"))
    assert ring.acquire_for_read(wait=False) is None  # the ring stands still
    ring.publish(works[0], BLOCK)
    ring.publish(works[1], BLOCK)
    ring.release(ring.wait_ready(0), 0)  # layer 0 is intact
    with pytest.raises(OSError, match="of layer 1"):
        ring.wait_ready(1)
    ring.restart(21)
    ring.publish(works[3], BLOCK)
    fill(ring)
    assert ring.wait_ready(21).read_number == 21


def test_a_late_release_touches_nothing(ring: SlotRing) -> None:
    fill(ring)
    slot = ring.wait_ready(0)
    ring.restart(2)
    fill(ring)
    assert ring.wait_ready(2) is slot
    ring.release(slot, 0)
    assert slot.state is SlotState.IN_USE


def test_a_late_exchange_touches_nothing(ring: SlotRing) -> None:
    """A layer was to be pinned, and its pass was aborted meanwhile."""
    fill(ring)
    slot = ring.wait_ready(0)
    ring.restart(2)
    fill(ring)
    assert ring.wait_ready(2) is slot
    other, pinnable = AlignedBuffer(2 * BLOCK), slot.buffer
    assert ring.exchange(slot, 0, other) is None
    assert (slot.state, slot.buffer) == (SlotState.IN_USE, pinnable)
    assert ring.exchange(slot, 2, other) is pinnable
    assert (slot.state, slot.buffer) == (SlotState.FREE, other)
    assert ring.exchange(slot, 2, pinnable) is None  # again: it is already released
    pinnable.close()


def test_closed(ring: SlotRing) -> None:
    fill(ring)
    slot = ring.wait_ready(0)
    ring.close()
    assert ring.acquire_for_read() is None
    with pytest.raises(StreamerClosed):
        ring.wait_ready(1)
    ring.release(slot, 0)
    ring.restart(5)


def test_busy_time_is_counted_once(ring: SlotRing, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first, second = take(ring), take(ring)
    now[0] += 3
    ring.publish(first, 10)
    now[0] += 2
    assert ring.read_stats() == (10, 5.0)  # the second is still running
    ring.publish(second, 20)
    now[0] += 50
    assert ring.read_stats() == (30, 5.0)


class CountedFences:
    """Make numbered fences."""

    def __init__(self) -> None:
        self.made: list[CountedFence] = []

    def __call__(self) -> CountedFence:
        self.made.append(CountedFence())
        return self.made[-1]


class CountedFence:
    def wait(self) -> None:
        raise AssertionError("the ring itself waits for nothing")


@pytest.fixture
def fenced() -> Iterator[tuple[SlotRing, CountedFences]]:
    fences = CountedFences()
    buffers = [AlignedBuffer(2 * BLOCK) for _ in range(2)]
    ring = SlotRing(buffers, lambda read_number: [read_chunk(0), read_chunk(1)], make_fence=fences)
    yield ring, fences
    ring.free_buffers()


def test_an_acquired_slot_is_freed_behind_a_fence(fenced) -> None:
    ring, fences = fenced
    for read_number in range(5):
        fill(ring)
        slot = ring.wait_ready(read_number)
        earlier = slot.fence
        assert earlier is (fences.made[read_number - 2] if read_number >= 2 else None)
        ring.release(slot, read_number)
        assert slot.fence is fences.made[-1] is not earlier
        ring.release(slot, read_number)  # again: it is already released
        assert len(fences.made) == read_number + 1


def test_a_restart_fences_acquired_slots_only(fenced) -> None:
    ring, fences = fenced
    fill(ring)
    fill(ring)  # ready, but unused
    pinnable = ring.wait_ready(0)
    ring.restart(10)
    assert pinnable.fence is fences.made[0]
    assert [slot.fence for slot in ring.slots if slot is not pinnable] == [None]
    ring.restart(20)
    assert len(fences.made) == 1
    assert take(ring).slot.fence is pinnable.fence  # read 20 takes the slot of read 0


def test_a_failed_fence_leaves_the_slot_acquired(fenced) -> None:
    """An interrupt comes at the worst moment: the restart after it makes the fence."""
    ring, fences = fenced
    fill(ring)
    slot = ring.wait_ready(0)

    def cut() -> CountedFence:
        raise KeyboardInterrupt

    ring._make_fence = cut
    with pytest.raises(KeyboardInterrupt):
        ring.release(slot, 0)
    assert slot.state is SlotState.IN_USE
    ring._make_fence = fences
    ring.restart(10)
    assert slot.state is SlotState.FREE
    assert slot.fence is fences.made[0]
