"""Reads, copies and devices that fail; passes that are given up: nothing wrong is ever computed."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from fake_device import DeviceBroken, FakeDevice, Policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupting import interrupted
from streaming import Gate, reader_threads, small_weights, uneven_sizes
from tiered import DEVICE, HOST, POLICIES, STORAGE, streaming, tiered, walk
from weight_files import FaultyReads, write_weights

from offload.device_streamer import DeviceStreamer
from offload.direct_io import ALIGNMENT, StorageError
from offload.slots import StreamerClosed

PAGE = ALIGNMENT
pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt inside of a generator that is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIXED = [STORAGE, HOST, STORAGE, DEVICE, STORAGE]
HANG_SECONDS = 60.0


def walk_with_errors(
    streamer: DeviceStreamer, device: FakeDevice, weights, kind: type[Exception], resume: int | None
) -> int:
    """Four passes; where a layer raises `kind`, on from layer `resume`, or the same (None)."""
    n_errors = 0
    for _ in range(4):
        index = 0
        while index < len(weights.layers):
            try:
                with streamer.layer(index) as tensors:
                    device.compute(lambda i=index, t=tensors: weights.check(i, t))
                index += 1
            except kind:
                n_errors += 1
                index = index if resume is None else resume
        device.synchronize()
    return n_errors


@pytest.mark.parametrize(
    "policies", [(Policy.LATE,) * 2, (Policy.EARLY,) * 2, (Policy.RANDOM,) * 2]
)
@pytest.mark.parametrize("resume", [0, None])
def test_a_transient_error_at_every_read(tmp_path: Path, policies, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    plan = tiered(weights, lambda i, j: STORAGE)
    for failing in range(22):  # two passes of 11 reads

        def fault(call: int, length: int, failing: int = failing) -> None:
            if call == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        device = FakeDevice(*policies, seed=failing)
        with streaming(plan, device, storage=FaultyReads(fault).storage) as streamer:
            assert walk_with_errors(streamer, device, weights, StorageError, resume) == 1


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("resume", [0, None])
def test_a_copy_that_cannot_be_enqueued(tmp_path: Path, policies, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    plan = tiered(weights, lambda i, j: HOST if j else STORAGE)
    for failing in range(10):
        device = FakeDevice(*policies, fail_copies=frozenset({failing}))
        with streaming(plan, device) as streamer:
            assert walk_with_errors(streamer, device, weights, RuntimeError, resume) == 1


@pytest.mark.parametrize("policies", POLICIES)
def test_a_device_that_breaks_gives_no_result(tmp_path: Path, policies, caplog) -> None:
    weights = small_weights(tmp_path)
    plan = tiered(weights, lambda i, j: MIXED[i])
    n_loading = 2  # the first copies bring what stays on the device
    for breaks_at in range(n_loading, 24, 3):
        device = FakeDevice(*policies, break_at=breaks_at)
        streamer = DeviceStreamer(plan, device, read_bytes=PAGE, n_readers=1)
        with pytest.raises(DeviceBroken):
            walk(streamer, device, weights, 4)
        with suppress(DeviceBroken):
            streamer.restart()  # which has nothing to do where the pass had reached its end
        with pytest.raises(DeviceBroken):
            walk(streamer, device, weights)
        streamer.close()
        assert (device.n_allocated, device.n_pinned) == (0, 0)
        assert "the device failed" in caplog.text


def test_a_device_that_breaks_while_loading(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000]], n_files=2)
    for breaks_at in range(2):
        device = FakeDevice(break_at=breaks_at)
        with pytest.raises(DeviceBroken):
            DeviceStreamer(tiered(weights, lambda i, j: DEVICE), device, n_readers=1)
        assert (device.n_allocated, device.n_pinned) == (0, 0)


def test_a_changed_file_is_noticed_before_the_pass_has_a_result(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000], [700]])
    for last in (STORAGE, HOST, DEVICE):
        device = FakeDevice()
        plan = tiered(weights, lambda i, j, last=last: last if i == 3 else STORAGE)
        with streaming(plan, device) as streamer:
            walk(streamer, device, weights, 2)
            os.utime(tmp_path / "shard-0.bin", ns=(1, 1 + len(last)))
            for _ in range(2):  # it does not heal by itself
                with pytest.raises(StorageError, match="changed while in use"):
                    walk(streamer, device, weights, 2)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_passes_given_up_anywhere(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A cancel: the layer's block raises, computations of it enqueued or not; then a new pass."""
    weights = write_weights(tmp_path_factory.mktemp("w"), uneven_sizes(5, 1))
    plan = tiered(
        weights,
        lambda i, j: MIXED[(i + j) % 5],
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
    )
    device = FakeDevice(*data.draw(st.sampled_from(POLICIES)), seed=data.draw(st.integers(0, 99)))
    with streaming(plan, device) as streamer:
        for _ in range(data.draw(st.integers(1, 4))):
            index = data.draw(st.integers(0, 4))
            walk(streamer, device, weights, data.draw(st.integers(1, 2)), stop_before=index)
            with suppress(KeyError), streamer.layer(index) as tensors:
                if data.draw(st.booleans()):
                    device.compute(lambda i=index, t=tensors: weights.check(i, t))
                raise KeyError
            if data.draw(st.booleans()):
                streamer.restart()
        walk(streamer, device, weights, 2)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_everything_goes_wrong_at_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Short reads and failing ones, failing copies, passes given up; then all is well again."""
    weights = write_weights(tmp_path_factory.mktemp("w"), uneven_sizes(5, 2), n_files=2)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    is_well = threading.Event()

    def fault(call: int, length: int) -> int | None:
        if is_well.is_set():
            return None
        if rng.random() < 0.08:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rng.choice([None, None, PAGE])

    device = FakeDevice(*data.draw(st.sampled_from(POLICIES)), seed=rng.randrange(99))
    tiers = data.draw(st.lists(st.sampled_from([STORAGE, STORAGE, HOST, DEVICE]), min_size=5))
    plan = tiered(
        weights,
        lambda i, j: tiers[(i + j) % len(tiers)],
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
    )
    is_well.set()  # while what stays is loaded
    with streaming(plan, device, storage=FaultyReads(fault).storage) as streamer:
        is_well.clear()
        device.fail_copies = frozenset(rng.sample(range(200), 20))
        for _ in range(data.draw(st.integers(1, 6))):
            with suppress(StorageError, RuntimeError):
                walk(streamer, device, weights, stop_before=data.draw(st.integers(0, 5)))
            device.check()
            if data.draw(st.booleans()):
                streamer.restart()
        is_well.set()
        device.fail_copies = frozenset()
        with suppress(StorageError, RuntimeError):  # what was read ahead meanwhile
            walk(streamer, device, weights)
        walk(streamer, device, weights, 2)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupted_walk(streamer, device, weights, first: int, then: int | None = None) -> list[str]:
    with interrupted(first, then) as interrupts:
        try:
            walk(streamer, device, weights)
        except KeyboardInterrupt:
            streamer.restart()
            raise
    return interrupts.places


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("policies", [(Policy.LATE, Policy.LATE), (Policy.EARLY, Policy.LATE)])
def test_an_interrupt_at_every_call_of_a_pass(tmp_path: Path, n_slots: int, policies) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    device = FakeDevice(*policies)
    places: set[str] = set()
    watchdog = threading.Timer(HANG_SECONDS, lambda: streamer.close())
    with streaming(tiered(weights, lambda i, j: MIXED[(i + j) % 5], n_slots), device) as streamer:
        watchdog.start()
        for at_call in range(1, 1000):
            found = interrupted_walk(streamer, device, weights, at_call)
            if not found:
                break
            places.update(found)
            streamer.restart()
            walk(streamer, device, weights, 2)
        watchdog.cancel()
    assert {"device_streamer.py:_lend", "device_streamer.py:_acquire"} <= places
    assert places & {
        "lending.py:_release",
        "walk.py:give_back",
        "slots.py:release",
        "slots.py:_free",
    }


def test_a_second_interrupt_in_the_repair(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    device = FakeDevice(Policy.EARLY, Policy.LATE)
    places: set[str] = set()
    watchdog = threading.Timer(HANG_SECONDS, lambda: streamer.close())
    with streaming(tiered(weights, lambda i, j: MIXED[(i + j) % 5]), device) as streamer:
        watchdog.start()
        for first in range(1, 1000, 4):
            found: list[str] = []
            for later in range(1, 40):
                found = interrupted_walk(streamer, device, weights, first, later)
                streamer.restart()
                walk(streamer, device, weights)
                if len(found) < 2:
                    break
                places.add(found[1])
            if not found:
                break
        watchdog.cancel()
    assert {
        "lending.py:restart",
        "walk.py:resume_at",
        "slots.py:restart",
        "slots.py:_free",
    } <= places


# --- closing --------------------------------------------------------------------------------------


def test_closing_in_the_midst_of_everything(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    for stop_before in range(5):
        for policies in POLICIES:
            device = FakeDevice(*policies)
            with streaming(tiered(weights, lambda i, j: MIXED[i]), device) as streamer:
                walk(streamer, device, weights, 2, stop_before=stop_before)
            with pytest.raises(StreamerClosed), streamer.layer(0):
                pass


def test_closing_while_the_copier_waits_for_storage(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(2)
    device = FakeDevice()
    plan = tiered(weights, lambda i, j: STORAGE)
    streamer = DeviceStreamer(plan, device, read_bytes=PAGE, n_readers=1, storage=gate.storage)
    gate.reached.wait()
    closing = threading.Thread(target=streamer.close)
    closing.start()
    with pytest.raises(StreamerClosed):
        walk(streamer, device, weights)
    gate.opened.set()
    closing.join()
    assert (device.n_allocated, device.n_pinned) == (0, 0)


def test_a_forgotten_streamer_ends_its_threads(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    device = FakeDevice()
    streamer = DeviceStreamer(tiered(weights, lambda i, j: STORAGE), device, read_bytes=PAGE)
    walk(streamer, device, weights)
    threads = reader_threads()
    assert threads
    del streamer
    gc.collect()
    for thread in threads:
        thread.join(10)
        gc.collect()
    assert not reader_threads()


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    for at_call in range(1, 1000):
        device = FakeDevice()
        streamer = DeviceStreamer(tiered(weights, lambda i, j: MIXED[i]), device, read_bytes=PAGE)
        walk(streamer, device, weights)
        with interrupted(at_call) as interrupts:
            streamer.close()
        streamer.close()
        assert (device.n_allocated, device.n_pinned) == (0, 0)
        if not interrupts.places:
            break
