"""Layers reach the device whole and in time, whatever the device delays or hurries."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_device import FakeDevice, Policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming import reader_threads, uneven_sizes
from tiered import DEVICE, HOST, POLICIES, STORAGE, run_passes, streaming, tiered
from weight_files import write_weights

from offload.budget import BudgetExceeded
from offload.device.streamer import DeviceStreamer
from offload.placement.placement import N_DEVICE_SLOTS, LayerWeights, Placement
from offload.ring.cursor import StreamStats
from offload.storage.aligned import ALIGNMENT

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")

MIXED = [STORAGE, HOST, DEVICE, STORAGE, HOST, STORAGE]


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_placement_any_depth_any_delay(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = st.sampled_from([0, 1, 4095, 4096, 4097, 9000]) | st.integers(0, 20_000)
    sizes = data.draw(st.lists(st.lists(size, max_size=3), min_size=1, max_size=7))
    tiers = data.draw(
        st.lists(
            st.lists(st.sampled_from([DEVICE, HOST, STORAGE]), min_size=3, max_size=3),
            min_size=len(sizes),
            max_size=len(sizes),
        )
    )
    weights = write_weights(
        tmp_path_factory.mktemp("w"), sizes, n_files=data.draw(st.integers(1, 2))
    )
    plan = tiered(
        weights,
        lambda i, j: tiers[i][j],
        data.draw(st.integers(1, 3)),
    )
    device = FakeDevice(*data.draw(st.sampled_from(POLICIES)), seed=data.draw(st.integers(0, 999)))
    with streaming(plan, device) as streamer:
        for _ in range(data.draw(st.integers(1, 2))):
            run_passes(
                streamer, device, weights, 2, stop_before=data.draw(st.integers(0, len(sizes)))
            )
        run_passes(streamer, device, weights, 2)


@pytest.mark.parametrize("copies", Policy)
@pytest.mark.parametrize("computations", Policy)
def test_every_layer_count_and_depth(tmp_path: Path, copies: Policy, computations: Policy) -> None:
    for n_layers in range(1, 7):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        weights = write_weights(folder, uneven_sizes(n_layers, 7 * n_layers))
        plan = tiered(weights, lambda i, j: MIXED[(i + j) % 6], 1 + n_layers % 3)
        device = FakeDevice(copies, computations, seed=n_layers)
        with streaming(plan, device) as streamer:
            run_passes(streamer, device, weights, 3)
            assert streamer.stats.passes == 3


# --- overlap, in the fake device's own time -------------------------------------------------------


@pytest.mark.parametrize(
    ("copy", "compute", "expected"),
    [
        (4096, 1000.0, 6 * 4096.0 + 1000),  # copies back to back, computations beside them
        (4096, 9000.0, 4096.0 + 6 * 9000),  # the other way around
    ],
)
def test_copies_and_computations_overlap(
    tmp_path: Path, copy: int, compute: float, expected: float
) -> None:
    weights = write_weights(tmp_path, [[copy]] * 6, padding=0)
    device = FakeDevice()
    with streaming(tiered(weights, lambda i, j: HOST), device) as streamer:
        run_passes(streamer, device, weights, seconds=compute)
        assert device.compute_stream.clock == expected
        assert streamer.stats.copy_stall_seconds == expected - 6 * compute


def test_the_next_pass_begins_with_copied_layers(tmp_path: Path) -> None:
    """Slots fill again while the host drafts; the next pass stalls that much less."""
    weights = write_weights(tmp_path, [[4096]] * 6, padding=0)
    device = FakeDevice(Policy.EARLY, Policy.EARLY)
    with streaming(tiered(weights, lambda i, j: HOST), device) as streamer:
        run_passes(streamer, device, weights)
        while streamer.stats.bytes_copied < 8 * 4096:
            pass
        device.compute(lambda: None, 1e6)  # drafting, say
        before = streamer.stats
        run_passes(streamer, device, weights)
        stalled = (streamer.stats - before).copy_stall_seconds
        assert stalled < 6 * 4096 - 2 * 4096 + 1


def test_resident_layers_hide_copies(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[4096]] * 6, padding=0)
    device = FakeDevice()
    plan = tiered(weights, lambda i, j: HOST if i % 2 else DEVICE)
    with streaming(plan, device) as streamer:
        run_passes(
            streamer, device, weights, seconds=5000.0
        )  # the first pass also follows the loading
        started, before = device.compute_stream.clock, streamer.stats
        run_passes(streamer, device, weights, seconds=5000.0)
        assert device.compute_stream.clock - started == 6 * 5000.0
        assert (streamer.stats - before).copy_stall_seconds == 0.0


def test_little_is_enqueued_ahead_of_the_device(tmp_path: Path) -> None:
    """Otherwise a cancel would come after the whole pass is enqueued, and wait for all of it."""
    weights = write_weights(tmp_path, [[4096]] * 8, padding=0)
    device = FakeDevice()  # which has computed nothing yet
    with streaming(tiered(weights, lambda i, j: HOST), device) as streamer:
        for index in range(8):
            with streamer.layer(index):
                device.compute(lambda: None)
                with device.lock:
                    n_enqueued = sum(step.run is not None for step in device.copying.steps)
                assert n_enqueued <= N_DEVICE_SLOTS


# --- metrics and limits ---------------------------------------------------------------------------


def test_memory_is_as_planned_and_taken_once(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, 3, 90_000), n_files=2)
    plan = tiered(weights, lambda i, j: MIXED[(i + j) % 6], 3)
    device = FakeDevice()
    with streaming(plan, device) as streamer:
        assert device.n_pinned <= plan.host_bytes < device.n_pinned + 20 * PAGE
        assert device.n_allocated <= plan.device_bytes
        device.allocate_device = device.allocate_pinned = None  # a call would fail
        run_passes(streamer, device, weights, 3)
        del device.allocate_device, device.allocate_pinned


def test_metrics(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000], [300], [8000]])
    plan = tiered(weights, lambda i, j: MIXED[i])
    device = FakeDevice()
    with streaming(plan, device) as streamer:
        run_passes(streamer, device, weights, 3)
        stats = streamer.stats
        assert stats.passes == 3
        # Copies that the ring made ahead at the end of the last pass come on top.
        assert 3 * plan.moved_bytes <= stats.bytes_copied <= 4 * plan.moved_bytes
        assert 3 * plan.streamed_bytes <= stats.bytes_read <= 5 * plan.streamed_bytes
        assert stats.copy_stall_seconds > 0
        assert (stats - stats) == StreamStats()


def test_all_on_the_device_needs_no_threads_and_no_pinned_memory(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 0], [5000]])
    device = FakeDevice()
    seen: list[tuple[int, int]] = []
    with streaming(
        tiered(weights, lambda i, j: DEVICE, 0),
        device,
        progress=lambda done, total: seen.append((done, total)),
    ) as streamer:
        assert not reader_threads()
        assert device.n_pinned == 0
        assert seen[-1][0] == seen[-1][1] >= 14_000
        run_passes(streamer, device, weights, 3)
        assert (streamer.n_slots, streamer.stats.bytes_copied) == (0, 0)


def test_progress_adds_up_over_the_pinned_layers(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    seen: list[tuple[int, int]] = []
    with streaming(
        tiered(weights, lambda i, j: HOST),
        FakeDevice(),
        progress=lambda done, total: seen.append((done, total)),
    ):
        pass
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] >= 26_000


def test_a_device_too_small_leaves_nothing_behind(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    for capacity in (100, 9000, 30_000):
        device = FakeDevice(capacity_bytes=capacity)
        with pytest.raises(BudgetExceeded, match="device"):
            DeviceStreamer(tiered(weights, lambda i, j: MIXED[2 - i]), device)
        assert (device.n_allocated, device.n_pinned) == (0, 0)


def test_a_placement_is_checked(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000]])
    names = frozenset(r.name for r in weights.layers[0].tensors)
    for on_device, in_host, said in (
        (names, names, "two tiers"),
        (frozenset({"other"}), frozenset(), "not in the layer"),
        (frozenset(), frozenset({"other"}), "not in the layer"),
    ):
        with pytest.raises(ValueError, match=said):
            LayerWeights(weights.layers[0].tensors, in_host, on_device)
    with pytest.raises(ValueError, match="through no slot"):
        tiered(weights, lambda i, j: STORAGE, 0)
    assert tiered(weights, lambda i, j: STORAGE, 9).n_slots == 2
    assert Placement(()).device_bytes == 0
