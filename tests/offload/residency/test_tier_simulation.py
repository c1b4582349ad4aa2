"""Passes over three tiers, simulated: exact cases, the two-tier ring as oracle, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.residency.ring_simulation import LayerWork, simulate_passes
from offload.residency.tier_simulation import TierWork, simulate_tiers

SECONDS = st.integers(0, 6)
LAYERS = st.lists(
    st.tuples(SECONDS, st.integers(1, 6), SECONDS, st.booleans()).map(
        lambda one: TierWork(0, 0, one[2]) if one[3] else TierWork(*one[:3])
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize(
    ("layers", "slots", "seconds", "stall"),
    [
        ([TierWork(0, 0, 3)] * 4, (0, 0), 12, 0),  # all on the device
        ([TierWork(0, 3, 2)] * 4, (0, 1), 20, 12),  # one device slot: nothing overlaps
        ([TierWork(0, 3, 2)] * 4, (0, 2), 12, 4),  # copies are the slowest
        ([TierWork(0, 2, 3)] * 4, (0, 2), 12, 0),  # computing is
        ([TierWork(5, 2, 1)] * 4, (2, 2), 20, 16),  # reading is
        ([TierWork(5, 2, 1)] * 4, (1, 2), 28, 24),  # a read waits for the copy out of its slot
        ([TierWork(3, 4, 1)] * 4, (2, 2), 16, 12),  # copies again
        # Every second layer comes from host memory: its copy hides half of a read.
        ([TierWork(4, 2, 0), TierWork(0, 2, 0)] * 2, (2, 2), 8, 8),
        # A layer that stays on the device hides copies.
        ([TierWork(0, 4, 1), TierWork(0, 0, 3)] * 2, (0, 2), 8, 0),
    ],
)
def test_small_tiers_by_hand(layers, slots, seconds, stall):
    times = simulate_tiers(layers, *slots)
    assert (times.seconds, times.stall_seconds) == (pytest.approx(seconds), pytest.approx(stall))


@settings(max_examples=150, deadline=None)
@given(layers=LAYERS, n_slots=st.integers(1, 4), gap=st.integers(0, 9))
def test_without_storage_the_device_ring_is_the_ring_of_two_tiers(layers, n_slots, gap):
    """Copies then do what reads do there."""
    tiers = simulate_tiers(
        [TierWork(0, one.copy_seconds, one.compute_seconds) for one in layers],
        0,
        n_slots,
        outer_seconds=1,
        gap_seconds=gap,
    )
    two = simulate_passes(
        [LayerWork(one.copy_seconds, one.compute_seconds) for one in layers],
        n_slots,
        outer_seconds=1,
        gap_seconds=gap,
    )
    assert tiers.cycle_seconds == pytest.approx(two.cycle_seconds, rel=0.01)


@settings(max_examples=150, deadline=None)
@given(
    layers=LAYERS,
    n_host=st.integers(1, 4),
    n_device=st.integers(1, 4),
    gap=st.integers(0, 9),
)
def test_a_pass_lies_between_the_slowest_and_the_sum_and_slots_help(layers, n_host, n_device, gap):
    def cycle(host: int, device: int) -> float:
        return simulate_tiers(layers, host, device, gap_seconds=gap).cycle_seconds

    reads = sum(one.read_seconds for one in layers)
    copies = sum(one.copy_seconds for one in layers)
    computes = sum(one.compute_seconds for one in layers) + gap
    now = cycle(n_host, n_device)
    assert max(reads, copies, computes) <= now + 1e-6
    assert now <= reads + copies + computes + 1e-6
    assert cycle(n_host + 1, n_device) <= now * 1.01 + 1e-6
    assert cycle(n_host, n_device + 1) <= now * 1.01 + 1e-6


def test_drafting_between_passes_is_hidden_as_far_as_slots_go():
    layers = [TierWork(0, 2, 1)] * 8  # 16 seconds of copies
    assert simulate_tiers(layers, 0, 2, gap_seconds=2).cycle_seconds == pytest.approx(16)
    deep = [simulate_tiers(layers, 0, n, gap_seconds=7).cycle_seconds for n in (2, 3, 4)]
    assert deep[0] > deep[1] > deep[2]


def test_what_is_read_is_copied_and_both_need_slots():
    with pytest.raises(ValueError, match="copied"):
        TierWork(1, 0, 1)
    with pytest.raises(ValueError, match="slots"):
        simulate_tiers([TierWork(1, 1, 1)], 0, 2)
    with pytest.raises(ValueError, match="slots"):
        simulate_tiers([TierWork(0, 1, 1)], 1, 0)
