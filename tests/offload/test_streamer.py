"""The streamer hands out the right bytes of every layer, whatever happens on the way."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import FaultyReads, Weights, write_weights

from offload import slots
from offload.direct_io import ALIGNMENT, StorageError
from offload.plan import LayerWeights
from offload.streamer import (
    StreamerClosed,
    StreamStats,
    WeightStreamer,
    load_resident,
    resident_footprint,
)

PAGE = ALIGNMENT


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("specdec-reader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    yield
    if reader_threads():
        gc.collect()
    for thread in reader_threads():
        thread.join(5)
    assert not reader_threads()


class Gate:
    """Reads from call `n_open` on wait until the gate is opened."""

    def __init__(self, n_open: int) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.n_open = n_open
        self.storage = FaultyReads(self._fault).storage

    def _fault(self, call: int, length: int) -> None:
        if call >= self.n_open and not self.opened.is_set():
            self.reached.set()
            self.opened.wait()


def uneven_sizes(n_layers: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, 9000) for _ in range(rng.randint(1, 3))] for _ in range(n_layers)]


# --- contents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", range(1, 17))
def test_every_layer_count_and_ring_depth(tmp_path: Path, n_slots: int) -> None:
    for n_layers in range(1, 17):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        weights = write_weights(folder, uneven_sizes(n_layers, 17 * n_layers + n_slots))
        with WeightStreamer(
            weights.layers, n_slots, read_bytes=PAGE, n_readers=3, poison=True
        ) as streamer:
            assert streamer.n_slots == min(n_slots, n_layers)
            weights.walk(streamer, n_passes=3)
            assert streamer.stats.passes == 3


def test_tensors_straddle_shards_and_are_partly_resident(tmp_path: Path) -> None:
    sizes = [[70_001, 3, 150_000, 5000, 0], [1, 2, 3, 0, 0], [90_000, 80_000, 70_000, 1, 1],
             [5000, 5000, 5000, 5000, 5000], [200_000, 1, 1, 1, 1]]  # fmt: skip
    weights = write_weights(
        tmp_path, sizes, n_files=3, resident=lambda i, j: (i + j) % 3 == 0 or i == 3
    )
    seen: list[tuple[int, int]] = []
    with WeightStreamer(
        weights.layers,
        2,
        read_bytes=16 * PAGE,
        poison=True,
        progress=lambda done, total: seen.append((done, total)),
    ) as streamer:
        weights.walk(streamer, n_passes=4)
        records = [r for layer in weights.layers for r in layer.resident_records]
        assert streamer.resident_bytes == resident_footprint(records)
        assert streamer.ring_bytes == 2 * max(layer.slot_bytes for layer in weights.layers)
    assert seen[-1][0] == seen[-1][1] > sum(record.n_bytes for record in records) - 1
    assert seen == sorted(seen)


def test_addresses_keep_the_files_alignment(tmp_path: Path) -> None:
    weights = write_weights(
        tmp_path, [[999, 70_000, 4096], [123, 300_000, 7]], resident=lambda i, j: j == 2
    )
    with WeightStreamer(weights.layers, 2) as streamer:
        for index, layer in enumerate(weights.layers):
            with streamer.layer(index) as tensors:
                for record in layer.tensors:
                    address = np.frombuffer(tensors[record.name], np.uint8).ctypes.data
                    assert address % PAGE == record.offset % PAGE


def test_released_slots_are_poisoned_and_nothing_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_weights(tmp_path, [[20_000], [30_000], [10_000]])
    gate = Gate(3)  # one read per layer: the gate shuts before the next pass
    with WeightStreamer(weights.layers, 3, storage=gate.storage, poison=True) as streamer:
        monkeypatch.setattr(slots, "AlignedBuffer", None)  # a call would fail
        with streamer.layer(0) as tensors:
            view = tensors["layers.0.t0"]
            weights.check(0, tensors)
        assert set(bytes(view)) == {0xFF}
        gate.opened.set()
        weights.walk(streamer, 3)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_layouts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    size = st.sampled_from([0, 1, 7, 4095, 4096, 4097, 65_536, 70_000]) | st.integers(0, 30_000)
    sizes = data.draw(st.lists(st.lists(size, max_size=4), min_size=1, max_size=7))
    chosen = data.draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3))))
    weights = write_weights(
        tmp_path_factory.mktemp("w"),
        sizes,
        n_files=data.draw(st.integers(1, 3)),
        padding=data.draw(st.integers(0, 9000)),
        resident=lambda i, j: (i, j) in chosen,
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    faulty = FaultyReads(
        lambda call, length: rng.choice([None, None, 4096, rng.randint(1, length)])
    )
    with WeightStreamer(
        weights.layers,
        data.draw(st.integers(1, 8)),
        read_bytes=PAGE * data.draw(st.sampled_from([1, 2, 7, 2048])),
        n_readers=data.draw(st.integers(1, 5)),
        storage=faulty.storage,
        poison=True,
    ) as streamer:
        weights.walk(streamer, 2, stop_before=data.draw(st.integers(0, len(sizes))))
        weights.walk(streamer, 2)


# --- storage that fails ------------------------------------------------------------------------


def disk_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def small_weights(folder: Path) -> Weights:
    return write_weights(folder, [[9000, 100], [5000], [12_000], [300], [8000]], n_files=2)


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("resume", [0, None])
def test_a_transient_error_at_every_read(tmp_path: Path, n_slots: int, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    with WeightStreamer(weights.layers, n_slots, read_bytes=PAGE, n_readers=1) as streamer:
        weights.walk(streamer)
    for failing in range(22):  # two passes of 11 reads
        reads = FaultyReads(lambda call, length, n=failing: _raise_if(call == n))
        with WeightStreamer(
            weights.layers, n_slots, read_bytes=PAGE, storage=reads.storage, poison=True
        ) as streamer:
            n_errors = 0
            for _ in range(4):
                index = 0
                while index < len(weights.layers):
                    try:
                        with streamer.layer(index) as tensors:
                            weights.check(index, tensors)
                        index += 1
                    except StorageError:
                        n_errors += 1
                        index = index if resume is None else resume  # the same layer, or the pass
            assert n_errors == 1


def _raise_if(condition: bool) -> None:
    if condition:
        raise disk_error()


def test_a_persistent_error_and_the_recovery(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: _raise_if(broken.is_set()))
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE, storage=reads.storage) as streamer:
        weights.walk(streamer, 2)
        broken.set()
        for _ in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                weights.walk(streamer, 3)
        streamer.restart()
        with pytest.raises(StorageError, match="Input/output error"):
            weights.walk(streamer)
        broken.clear()
        weights.walk(streamer, 2)


def test_any_other_exception_of_a_reader_surfaces(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)

    def fault(call: int, length: int) -> None:
        if call == 4:
            raise RuntimeError("a bug")

    with WeightStreamer(
        weights.layers, 2, read_bytes=PAGE, storage=FaultyReads(fault).storage
    ) as streamer:
        with pytest.raises(RuntimeError, match="a bug"):
            weights.walk(streamer)
        weights.walk(streamer, 2)


@pytest.mark.parametrize("seed", range(5))
def test_short_and_interrupted_reads_change_nothing(tmp_path: Path, seed: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, seed), n_files=2)
    rng = random.Random(seed)

    def fault(call: int, length: int) -> int | None:
        if rng.random() < 0.2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return rng.choice([None, rng.randint(1, length), 4096])

    reads = FaultyReads(fault)
    with WeightStreamer(
        weights.layers, 3, read_bytes=2 * PAGE, storage=reads.storage, poison=True
    ) as streamer:
        weights.walk(streamer, 5)


@pytest.mark.parametrize("cut", [0, 1, 5000, 8192, 33_000])
def test_a_file_cut_while_running(tmp_path: Path, cut: int) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000], [300], [8000]])
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE) as streamer:
        weights.walk(streamer)
        os.truncate(tmp_path / "shard-0.bin", cut)
        with pytest.raises(StorageError, match="ended early|changed while in use"):
            weights.walk(streamer, 3)


def test_a_file_cut_before_opening(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000]])
    os.truncate(tmp_path / "shard-0.bin", 12_000)
    with WeightStreamer(weights.layers, 2) as streamer:
        with streamer.layer(0) as tensors:
            weights.check(0, tensors)
        with pytest.raises(StorageError, match="ended early"):
            weights.walk(streamer)
    pinned = [LayerWeights(layer.tensors, frozenset(r.name for r in layer.tensors))
              for layer in weights.layers]  # fmt: skip
    with pytest.raises(StorageError, match="ended early"):
        WeightStreamer(pinned, 0)


def test_overwriting_is_noticed_by_the_end_of_the_pass(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.walk(streamer, 2)
        path = tmp_path / "shard-0.bin"
        os.utime(path, ns=(1, 1))
        for _ in range(2):  # it does not heal by itself
            with pytest.raises(StorageError, match="changed while in use"):
                weights.walk(streamer)
        assert streamer.stats.passes == 2


def test_renaming_another_file_over_it_changes_nothing(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2) as streamer:
        (tmp_path / "other").write_bytes(b"x" * 5)
        (tmp_path / "other").rename(tmp_path / "shard-0.bin")
        weights.walk(streamer, 3)


def test_a_missing_file_leaves_nothing_open(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 100], [5000, 7]], n_files=2)
    (tmp_path / "shard-1.bin").unlink()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="cannot open"):
        WeightStreamer(weights.layers, 2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_resident_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]] * 4, resident=lambda i, j: True)
    reads = FaultyReads(lambda call, length: _raise_if(call == 2))
    with pytest.raises(StorageError, match="Input/output error"):
        load_resident(
            [r for layer in weights.layers for r in layer.tensors],
            read_bytes=PAGE,
            storage=reads.storage,
        )


# --- passes that are given up ------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(6))
def test_an_aborted_pass_begins_anew(tmp_path: Path, n_slots: int, stop: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, stop), resident=lambda i, j: i in (0, 3))
    with WeightStreamer(weights.layers, n_slots, read_bytes=PAGE, poison=True) as streamer:
        for explicit in (False, True):
            weights.walk(streamer, 2, stop_before=stop)
            if explicit:
                streamer.restart()
            weights.walk(streamer)
        assert streamer.stats.passes == 4 if stop else 2


def test_any_layer_may_be_asked_for(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(7, 1), resident=lambda i, j: i in (0, 6))
    rng = random.Random(0)
    with WeightStreamer(weights.layers, 3, read_bytes=PAGE, poison=True) as streamer:
        for _ in range(200):
            index = rng.randrange(7)
            with streamer.layer(index) as tensors:
                weights.check(index, tensors)


def test_an_exception_in_the_with_block_releases_the_slot(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with WeightStreamer(weights.layers, 1, poison=True) as streamer:
        for index in range(5):
            with pytest.raises(ZeroDivisionError), streamer.layer(index):
                raise ZeroDivisionError
        assert streamer.stats.passes == 0
        weights.walk(streamer, 2)


def test_a_restart_takes_back_what_is_lent(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with WeightStreamer(weights.layers, 2) as streamer:
        lent = streamer.layer(0)  # never left, as after a KeyboardInterrupt between two lines
        lent.__enter__()
        streamer.restart()
        weights.walk(streamer, 2)
        lent.__exit__(None, None, None)
        weights.walk(streamer, 2)


def test_no_restart_is_made_where_none_is_needed(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    reads = FaultyReads()
    with WeightStreamer(weights.layers, 5, storage=reads.storage) as streamer:
        weights.walk(streamer)
        streamer.restart()
        weights.walk(streamer)
        n_bytes = sum(layer.slot_bytes for layer in weights.layers)
        assert streamer.stats.bytes_read <= 3 * n_bytes


def test_layers_may_be_nested_as_deep_as_the_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2, poison=True) as streamer:
        with streamer.layer(0) as first, streamer.layer(1) as second:
            weights.check(0, first)
            weights.check(1, second)
            with pytest.raises(RuntimeError, match="2 slots"), streamer.layer(2):
                pass
            with pytest.raises(RuntimeError, match="out of order"), streamer.layer(0):
                pass
            weights.check(0, first)
        weights.walk(streamer, 2)


# --- waiting and closing -----------------------------------------------------------------------


def test_ctrl_c_interrupts_the_wait(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(2)
    with WeightStreamer(
        weights.layers, 2, read_bytes=PAGE, storage=gate.storage, poison=True
    ) as streamer:
        # The gate stays shut until the interrupt has come through: a deaf wait would never end.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            weights.walk(streamer)
        gate.opened.set()
        weights.walk(streamer, 2)


def test_closing_while_the_caller_waits(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(0)
    streamer = WeightStreamer(weights.layers, 2, storage=gate.storage)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            with streamer.layer(0):
                pass
        except BaseException as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.reached.wait()
    closing = threading.Thread(target=streamer.close)
    closing.start()
    waiting.join()
    assert isinstance(caught[0], StreamerClosed)
    gate.opened.set()
    closing.join()


@pytest.mark.parametrize("n_open", [0, 1, 5, 10])
def test_closing_while_readers_are_busy(tmp_path: Path, n_open: int) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(n_open)
    streamer = WeightStreamer(weights.layers, 5, read_bytes=PAGE, n_readers=4, storage=gate.storage)
    gate.reached.wait()
    threading.Timer(0.05, gate.opened.set).start()
    streamer.close()
    streamer.close()
    assert not reader_threads()
    with pytest.raises(StreamerClosed), streamer.layer(0):
        pass
    streamer.restart()


def test_a_view_that_outlives_the_streamer_is_safe(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 5000]], resident=lambda i, j: j == 0)
    streamer = WeightStreamer(weights.layers, 1)
    with streamer.layer(0) as tensors:
        arrays = [np.frombuffer(view, np.uint8) for view in tensors.values()]
        streamer.close()
        assert [bytes(a) for a in arrays] == list(weights.contents.values())


def test_a_read_that_never_returns_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.streamer._JOIN_SECONDS", 0.01)
    weights = small_weights(tmp_path)
    gate = Gate(0)
    streamer = WeightStreamer(weights.layers, 2, storage=gate.storage)
    gate.reached.wait()
    streamer.close()
    gate.opened.set()  # it returns after all, into memory that is still there
    for thread in reader_threads():
        thread.join()


def test_a_forgotten_streamer_ends_its_threads(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    streamer = WeightStreamer(weights.layers, 2)
    weights.walk(streamer)
    del streamer
    gc.collect()
    for thread in reader_threads():
        thread.join(5)
    assert not reader_threads()


# --- edges and figures -------------------------------------------------------------------------


def test_everything_resident_needs_no_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 0], [5000]], resident=lambda i, j: True)
    with WeightStreamer(weights.layers, 0) as streamer:
        assert not reader_threads()
        weights.walk(streamer, 3)
        assert streamer.stats == StreamStats(passes=3, stall_seconds=streamer.stats.stall_seconds)
        assert (streamer.n_slots, streamer.ring_bytes) == (0, 0)


def test_layers_without_bytes(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[], [0], [5000], []])
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.walk(streamer, 3)


def test_arguments_are_checked(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000]])
    with pytest.raises(ValueError, match="slot and a reader"):
        WeightStreamer(weights.layers, 0)
    with pytest.raises(ValueError, match="slot and a reader"):
        WeightStreamer(weights.layers, 1, n_readers=0)
    with pytest.raises(ValueError, match="multiple of 4096"):
        WeightStreamer(weights.layers, 1, read_bytes=1000)
    with WeightStreamer(weights.layers, 1) as streamer:
        for index in (-1, 1):
            with pytest.raises(IndexError), streamer.layer(index):
                pass


def test_figures(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[PAGE * 4], [PAGE * 8]], padding=0)
    with WeightStreamer(weights.layers, 1, read_bytes=PAGE) as streamer:
        weights.walk(streamer, 2)
        before = streamer.stats
        assert before.passes == 2
        assert before.bytes_read >= 2 * PAGE * 12
        assert before.stall_seconds > 0
        assert before.read_seconds > 0
        weights.walk(streamer)
        span = streamer.stats - before
        assert span.passes == 1
        assert PAGE * 8 <= span.bytes_read <= PAGE * 16


def test_load_resident(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[70_000, 5, 0, 8192]], n_files=2)
    records = weights.layers[0].tensors
    loaded = load_resident(records)
    weights.check(0, {record.name: loaded[record.name] for record in records})
    assert loaded.n_bytes == resident_footprint(records)
    assert len(loaded) == 4
    loaded.close()
    empty = load_resident([])
    assert (len(empty), empty.n_bytes) == (0, 0)
    empty.close()


# --- faults of real system calls ---------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from weight_files import write_weights
from offload.direct_io import StorageError
from offload.streamer import WeightStreamer

weights = write_weights(Path(sys.argv[1]), [[9000], [5000], [12000]])
n_good = n_bad = 0
with WeightStreamer(weights.layers, 2, read_bytes=4096, n_readers=1, poison=True) as streamer:
    while n_good < 3 and n_bad < 20:
        try:
            weights.walk(streamer)
            n_good += 1
        except StorageError as error:
            assert "Input/output error" in str(error)
            n_bad += 1
print(n_good, "passes,", n_bad, "errors")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ("error=EIO:when=2", "3 passes, 1 errors"),
        ("error=EIO:when=5+4", None),  # every fourth read
        ("error=EIO:when=2+", "0 passes, 20 errors"),
        ("error=EINTR:when=2+2", "3 passes, 0 errors"),
    ],
)
def test_faults_of_real_reads(tmp_path: Path, fault: str, output: str | None) -> None:
    root = Path(__file__).parents[2]
    calls = "preadv,preadv2"
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}"]
    argv = [*strace, "-e", f"inject={calls}:{fault}", sys.executable, "-c", CHILD, str(tmp_path)]
    path = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this system does not allow tracing")
    assert done.returncode == 0, done.stderr
    assert output is None or done.stdout.strip() == output
