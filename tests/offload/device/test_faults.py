"""Failing reads, copies and devices, and aborted passes: nothing wrong is ever computed."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from fake_device import DeviceBroken, FakeDevice, Policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming import small_weights, uneven_sizes
from tiered import DEVICE, HOST, POLICIES, STORAGE, run_passes, streaming, tiered
from weight_files import FaultyReads, Weights, write_weights

from offload.device.streamer import DeviceStreamer
from offload.placement.placement import Placement
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")
MIXED = [STORAGE, HOST, STORAGE, DEVICE, STORAGE]


def any_run(test: Callable[..., None]) -> Callable[..., None]:
    """Let hypothesis choose the events: takes a factory of folders, and `data`."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    limits = settings(max_examples=50, deadline=None, suppress_health_check=checks)
    return limits(given(data=st.data())(test))


def any_plan(data: st.DataObject, weights: Weights, tiers: Sequence[str]) -> Placement:
    """Distribute tensors over `tiers` in turn, through a ring of any depth."""
    return tiered(weights, lambda i, j: tiers[(i + j) % len(tiers)], data.draw(st.integers(1, 3)))


def walk_with_errors(
    streamer: DeviceStreamer, device: FakeDevice, weights, kind: type[Exception], resume: int | None
) -> int:
    """Run four passes; after an error `kind`, resume at layer `resume`, or at the same (None)."""
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


@pytest.mark.slow_except(4)
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
    n_loading = 2  # the first copies fill the resident device memory
    for breaks_at in range(n_loading, 24, 3):
        device = FakeDevice(*policies, break_at=breaks_at)
        streamer = DeviceStreamer(plan, device, read_bytes=PAGE, n_readers=1)
        with pytest.raises(DeviceBroken):
            run_passes(streamer, device, weights, 4)
        with suppress(DeviceBroken):
            streamer.restart()  # a no-op if the pass had reached its end
        with pytest.raises(DeviceBroken):
            run_passes(streamer, device, weights)
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
            run_passes(streamer, device, weights, 2)
            os.utime(tmp_path / "shard-0.bin", ns=(1, 1 + len(last)))
            for _ in range(2):  # it does not heal by itself
                with pytest.raises(StorageError, match="changed while in use"):
                    run_passes(streamer, device, weights, 2)


@any_run
def test_passes_given_up_anywhere(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cancel: the layer's block raises, with or without enqueued computations; then a new pass."""
    weights = write_weights(tmp_path_factory.mktemp("w"), uneven_sizes(5, 1))
    plan = any_plan(data, weights, MIXED)
    device = FakeDevice(*data.draw(st.sampled_from(POLICIES)), seed=data.draw(st.integers(0, 99)))
    with streaming(plan, device) as streamer:
        for _ in range(data.draw(st.integers(1, 4))):
            index = data.draw(st.integers(0, 4))
            run_passes(streamer, device, weights, data.draw(st.integers(1, 2)), stop_before=index)
            with suppress(KeyError), streamer.layer(index) as tensors:
                if data.draw(st.booleans()):
                    device.compute(lambda i=index, t=tensors: weights.check(i, t))
                raise KeyError
            if data.draw(st.booleans()):
                streamer.restart()
        run_passes(streamer, device, weights, 2)


@any_run
def test_everything_goes_wrong_at_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Short and failing reads, failing copies, aborted passes; then everything works again."""
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
    plan = any_plan(data, weights, tiers)
    is_well.set()  # while resident weights load
    with streaming(plan, device, storage=FaultyReads(fault).storage) as streamer:
        is_well.clear()
        device.fail_copies = frozenset(rng.sample(range(200), 20))
        for _ in range(data.draw(st.integers(1, 6))):
            with suppress(StorageError, RuntimeError):
                run_passes(streamer, device, weights, stop_before=data.draw(st.integers(0, 5)))
            device.check()
            if data.draw(st.booleans()):
                streamer.restart()
        is_well.set()
        device.fail_copies = frozenset()
        with suppress(StorageError, RuntimeError):  # read ahead meanwhile
            run_passes(streamer, device, weights)
        run_passes(streamer, device, weights, 2)
