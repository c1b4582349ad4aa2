"""The simulated ring: exact cases, an oracle that counts ticks, bounds, monotonicity."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.placement.simulation import LayerWork, Overlap, SimulatedPass, simulate_passes

WORKS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: LayerWork(*pair)),
    min_size=1,
    max_size=7,
).filter(lambda layers: any(layer.read_seconds for layer in layers))


def uniform(n_layers: int, read: float, compute: float) -> list[LayerWork]:
    return [LayerWork(read, compute)] * n_layers


@pytest.mark.parametrize(
    ("layers", "n_slots", "seconds", "stall"),
    [
        (uniform(4, 3, 2), 1, 20, 12),  # one slot: nothing overlaps
        (uniform(4, 3, 2), 2, 12, 4),  # reading is slower
        (uniform(4, 2, 3), 2, 12, 0),  # computing is slower
        (uniform(4, 0, 3), 2, 12, 0),  # nothing streams
        ([LayerWork(4, 1), LayerWork(0, 3)], 1, 5, 1),  # the resident layer hides a read
        ([LayerWork(4, 1), LayerWork(4, 1), LayerWork(0, 6)], 2, 8, 0),
        # Neither: each big read waits for its slot, which a big computation uses.
        ([LayerWork(4, 0), LayerWork(0, 4), LayerWork(0, 0)], 1, 4, 0),
        ([LayerWork(5, 1), LayerWork(1, 5)], 1, 12, 6),
    ],
)
def test_small_rings_by_hand(layers, n_slots, seconds, stall):
    times = simulate_passes(layers, n_slots)
    assert (times.seconds, times.stall_seconds) == (seconds, stall)


def test_a_gap_between_passes_is_hidden_as_far_as_there_are_slots():
    layers = uniform(8, 2, 1)  # 16 seconds of reading, 8 of computing

    def cycle(gap: float, n_slots: int) -> float:
        return simulate_passes(layers, n_slots, gap_seconds=gap).cycle_seconds

    assert cycle(0, 3) == cycle(4, 3) == 16  # the readers never have to stop
    # Three reads fill the slots; the fourth begins when the next pass has used a layer.
    assert cycle(7, 3) == 19
    assert cycle(7, 4) == 17
    assert cycle(20, 3) == 32
    assert simulate_passes(layers, 3, gap_seconds=20).gap_seconds == 20


def test_the_head_counts_in_the_pass_and_hides_reads_too():
    layers = uniform(4, 3, 1)
    assert simulate_passes(layers, 2, non_layer_seconds=3).seconds == 12
    assert simulate_passes(layers, 2, non_layer_seconds=30).seconds == 38


def test_what_runs_at_the_same_time_slows_each_other():
    both = Overlap(read=1.5, compute=2.0)
    # One slot: reading and computing never overlap, except in the gap.
    assert simulate_passes(uniform(4, 3, 2), 1, overlap=both).seconds == 20
    # Resident layers beside one read: all of the read's 1.5 * 4 seconds, 3 of computing during
    # it, the other 2 alone.
    layers = [LayerWork(4, 0), LayerWork(0, 5)]
    assert simulate_passes(layers, 1, overlap=both).seconds == pytest.approx(8)
    # Always both: the slower one, slowed further.
    long = simulate_passes(uniform(4, 1, 10), 4, overlap=both)
    assert long.seconds == pytest.approx(4 * 10 + 4 * 1.5 * (1 - 1 / 2.0))


def ticking(layers: list[LayerWork], n_slots: int, gap: int, n_passes: int) -> list[int]:
    """Return when each pass begins: reader and consumer do one second of work per tick."""
    work = [*layers, LayerWork(0, gap)]
    reads = [int(layer.read_seconds) for layer in layers if layer.read_seconds]
    n_slots = min(n_slots, len(reads))
    n_read = n_released = read_done = 0  # layers read; slots freed; seconds of the next one
    begins: list[int] = []
    position = n_taken = done = clock = 0
    while len(begins) <= n_passes:
        moved = True
        while moved:  # steps that take no time
            moved = False
            layer = work[position]
            needs = n_taken + (1 if layer.read_seconds else 0)
            if n_read >= needs and done == layer.compute_seconds:
                if position == 0:
                    pass
                n_taken, done = needs, 0
                n_released = n_taken
                position = (position + 1) % len(work)
                if position == 0:
                    begins.append(clock)
                    if len(begins) > n_passes:
                        return begins
                moved = True
        clock += 1
        can_read = n_read < n_released + n_slots
        layer = work[position]
        is_in = n_read >= n_taken + (1 if layer.read_seconds else 0)
        if is_in and done < layer.compute_seconds:
            done += 1
        if can_read:
            read_done += 1
            if read_done == reads[n_read % len(reads)]:
                n_read, read_done = n_read + 1, 0
    return begins


@settings(max_examples=200, deadline=None)
@given(layers=WORKS, n_slots=st.integers(1, 4), gap=st.integers(0, 9))
@example(layers=uniform(3, 2, 2), n_slots=2, gap=0)
@example(layers=[LayerWork(5, 1), LayerWork(1, 5), LayerWork(0, 2)], n_slots=2, gap=1)
def test_the_same_as_a_machine_that_ticks(layers, n_slots, gap):
    if not any(layer.compute_seconds for layer in layers) and not gap:
        gap = 1
    times = simulate_passes(layers, n_slots, gap_seconds=gap)
    n_passes = 60  # many times the largest likely cycle
    begins = ticking(layers, n_slots, gap, 2 * n_passes)
    mean = (begins[-1] - begins[n_passes]) / n_passes
    assert times.cycle_seconds == pytest.approx(mean, abs=6 / n_passes)


@settings(max_examples=200, deadline=None)
@given(layers=WORKS, n_slots=st.integers(1, 4), gap=st.integers(0, 9), non_layer=st.integers(0, 5))
def test_no_faster_than_either_alone_and_no_slower_than_both_in_turn(
    layers, n_slots, gap, non_layer
):
    times = simulate_passes(layers, n_slots, non_layer_seconds=non_layer, gap_seconds=gap)
    reading = sum(layer.read_seconds for layer in layers)
    computing = sum(layer.compute_seconds for layer in layers) + non_layer
    tiny = 1e-6
    assert times.gap_seconds == gap
    assert max(reading, computing + gap) - tiny <= times.cycle_seconds
    assert times.cycle_seconds <= reading + computing + gap + tiny
    assert times.seconds == pytest.approx(computing + times.stall_seconds)
    assert times.stall_seconds <= reading + tiny


@settings(max_examples=150, deadline=None)
@given(layers=WORKS, n_slots=st.integers(1, 3), gap=st.integers(0, 9), data=st.data())
def test_more_work_takes_longer_and_more_slots_do_not(layers, n_slots, gap, data):
    def cycle(some: list[LayerWork], slots: int = n_slots, between: float = gap) -> float:
        return simulate_passes(some, slots, gap_seconds=between).cycle_seconds

    tiny = 1e-6
    base = cycle(layers)
    assert cycle(layers, slots=n_slots + 1) <= base + tiny
    assert base <= cycle(layers, between=gap + 1) + tiny
    assert cycle(layers, between=gap + 1) <= base + 1 + tiny
    at = data.draw(st.integers(0, len(layers) - 1))
    item = layers[at]
    for changed in (
        LayerWork(item.read_seconds, item.compute_seconds + 1),
        LayerWork(item.read_seconds + 1, item.compute_seconds) if item.read_seconds else item,
    ):
        assert base <= cycle([*layers[:at], changed, *layers[at + 1 :]]) + tiny


@settings(max_examples=100, deadline=None)
@given(
    layers=WORKS,
    n_slots=st.integers(1, 4),
    read=st.floats(1, 3),
    compute=st.floats(1, 3),
)
def test_contention_costs_at_most_its_factors(layers, n_slots, read, compute):
    alone = simulate_passes(layers, n_slots)
    slowed = simulate_passes(layers, n_slots, overlap=Overlap(read, compute))
    reading = sum(layer.read_seconds for layer in layers)
    computing = sum(layer.compute_seconds for layer in layers)
    assert max(reading, computing) - 1e-6 <= slowed.seconds
    assert slowed.seconds <= reading * read + computing * compute + 1e-6
    assert isinstance(alone, SimulatedPass)


def test_streaming_needs_a_slot():
    with pytest.raises(ValueError, match="needs a slot"):
        simulate_passes(uniform(2, 1, 1), 0)
    assert simulate_passes(uniform(2, 0, 1), 0).seconds == 2


# --- a device ring as one more stage --------------------------------------------------------------


def moved(read: float, copy: float, compute: float) -> LayerWork:
    return LayerWork(read, compute, copy)


SECONDS = st.integers(0, 6)
TIERED_LAYERS = st.lists(
    st.tuples(SECONDS, st.integers(1, 6), SECONDS, st.booleans()).map(
        lambda item: moved(0, 0, item[2]) if item[3] else moved(*item[:3])
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize(
    ("layers", "slots", "seconds", "stall"),
    [
        ([moved(0, 0, 3)] * 4, (0, 0), 12, 0),  # all on the device
        ([moved(0, 3, 2)] * 4, (0, 1), 20, 12),  # one device slot: nothing overlaps
        ([moved(0, 3, 2)] * 4, (0, 2), 12, 4),  # copies are the slowest
        ([moved(0, 2, 3)] * 4, (0, 2), 12, 0),  # computing is
        ([moved(5, 2, 1)] * 4, (2, 2), 20, 16),  # reading is
        ([moved(5, 2, 1)] * 4, (1, 2), 28, 24),  # a read waits for the copy out of its slot
        ([moved(3, 4, 1)] * 4, (2, 2), 16, 12),  # copies again
        # Every second layer comes from host memory: its copy hides half of a read.
        ([moved(4, 2, 0), moved(0, 2, 0)] * 2, (2, 2), 8, 8),
        # A layer that stays on the device hides copies.
        ([moved(0, 4, 1), moved(0, 0, 3)] * 2, (0, 2), 8, 0),
    ],
)
def test_small_tiers_by_hand(layers, slots, seconds, stall):
    times = simulate_passes(layers, *slots)
    assert (times.seconds, times.stall_seconds) == (pytest.approx(seconds), pytest.approx(stall))


@settings(max_examples=150, deadline=None)
@given(layers=TIERED_LAYERS, n_slots=st.integers(1, 4), gap=st.integers(0, 9))
def test_without_storage_a_device_ring_is_like_one_that_files_are_read_to(layers, n_slots, gap):
    """Copies then take the role of reads."""
    copied = simulate_passes(
        [moved(0, item.copy_seconds, item.compute_seconds) for item in layers],
        0,
        n_slots,
        non_layer_seconds=1,
        gap_seconds=gap,
    )
    read = simulate_passes(
        [LayerWork(item.copy_seconds, item.compute_seconds) for item in layers],
        n_slots,
        non_layer_seconds=1,
        gap_seconds=gap,
    )
    assert copied.cycle_seconds == pytest.approx(read.cycle_seconds, rel=0.01)


@settings(max_examples=150, deadline=None)
@given(
    layers=TIERED_LAYERS,
    n_host=st.integers(1, 4),
    n_device=st.integers(1, 4),
    gap=st.integers(0, 9),
)
def test_a_pass_lies_between_the_slowest_and_the_sum_and_slots_help(layers, n_host, n_device, gap):
    def cycle(host: int, device: int) -> float:
        return simulate_passes(layers, host, device, gap_seconds=gap).cycle_seconds

    reads = sum(item.read_seconds for item in layers)
    copies = sum(item.copy_seconds for item in layers)
    computes = sum(item.compute_seconds for item in layers) + gap
    now = cycle(n_host, n_device)
    assert max(reads, copies, computes) <= now + 1e-6
    assert now <= reads + copies + computes + 1e-6
    assert cycle(n_host + 1, n_device) <= now * 1.01 + 1e-6
    assert cycle(n_host, n_device + 1) <= now * 1.01 + 1e-6


def test_drafting_between_passes_is_hidden_as_far_as_slots_go():
    layers = [moved(0, 2, 1)] * 8  # 16 seconds of copies
    assert simulate_passes(layers, 0, 2, gap_seconds=2).cycle_seconds == pytest.approx(16)
    deep = [simulate_passes(layers, 0, n, gap_seconds=7).cycle_seconds for n in (2, 3, 4)]
    assert deep[0] > deep[1] > deep[2]


def test_what_is_read_is_copied_and_both_need_slots():
    with pytest.raises(ValueError, match="copied"):
        simulate_passes([moved(1, 0, 1), moved(0, 1, 1)], 1, 1)
    with pytest.raises(ValueError, match="needs a slot"):
        simulate_passes([moved(1, 1, 1)], 0, 2)
    with pytest.raises(ValueError, match="needs a slot"):
        simulate_passes([moved(0, 1, 1)], 1, 0)
