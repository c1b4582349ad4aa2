"""Failing storage: every error surfaces once, and no wrong bytes get through."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from open_files import n_open_files
from streaming import small_weights, uneven_sizes, wait_for_failure
from weight_files import FaultyReads, write_weights

from offload.placement.placement import LayerWeights
from offload.ring.streamer import (
    WeightStreamer,
    load_resident,
)
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def disk_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("resume", [0, None])
def test_a_transient_error_at_every_read(tmp_path: Path, n_slots: int, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    with WeightStreamer(weights.layers, n_slots, read_bytes=PAGE, n_readers=1) as streamer:
        weights.run_passes(streamer)
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
        weights.run_passes(streamer, 2)
        broken.set()
        for _ in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                weights.run_passes(streamer, 3)
        streamer.restart()
        with pytest.raises(StorageError, match="Input/output error"):
            weights.run_passes(streamer)
        broken.clear()
        weights.run_passes(streamer, 2)


def test_an_error_is_not_raised_again_once_storage_is_well(tmp_path: Path) -> None:
    """The readers fail once more right after a restart, long before the next pass asks."""
    weights = small_weights(tmp_path)
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: _raise_if(broken.is_set()))
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE, storage=reads.storage) as streamer:
        weights.run_passes(streamer)
        broken.set()
        with pytest.raises(StorageError, match="Input/output error"):
            weights.run_passes(streamer, 2)
        streamer.restart()
        wait_for_failure(streamer)
        broken.clear()
        weights.run_passes(streamer, 2)


def test_nor_is_one_behind_a_layer_that_came(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[100]] * 3)
    # After the restart layer 0 arrives (call 1), and layer 1 does not.
    reads = FaultyReads(lambda call, length: _raise_if(call in (0, 2)))
    with WeightStreamer(weights.layers, 2, n_readers=1, storage=reads.storage) as streamer:
        with pytest.raises(StorageError, match="Input/output error"):
            streamer.enter(0)
        streamer.restart()
        wait_for_failure(streamer)
        weights.run_passes(streamer, 2)


def test_what_failed_ahead_is_read_again_once(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[100]] * 3)
    reads = FaultyReads(lambda call, length: _raise_if(True))
    with WeightStreamer(weights.layers, 1, n_readers=1, storage=reads.storage) as streamer:
        with pytest.raises(StorageError, match="Input/output error"):
            streamer.enter(0)
        streamer.restart()
        wait_for_failure(streamer)
        before = reads.n_calls
        with pytest.raises(StorageError, match="Input/output error"):
            streamer.enter(0)
        assert reads.n_calls == before + 1


def test_any_other_exception_of_a_reader_surfaces(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)

    def fault(call: int, length: int) -> None:
        if call == 4:
            raise RuntimeError("a bug")

    with WeightStreamer(
        weights.layers, 2, read_bytes=PAGE, storage=FaultyReads(fault).storage
    ) as streamer:
        with pytest.raises(RuntimeError, match="a bug"):
            weights.run_passes(streamer)
        weights.run_passes(streamer, 2)


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
        weights.run_passes(streamer, 5)


@pytest.mark.parametrize("cut", [0, 1, 5000, 8192, 33_000])
def test_a_file_cut_while_running(tmp_path: Path, cut: int) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000], [300], [8000]])
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE) as streamer:
        weights.run_passes(streamer)
        os.truncate(tmp_path / "shard-0.bin", cut)
        with pytest.raises(StorageError, match="ended early|changed while in use"):
            weights.run_passes(streamer, 3)


def test_a_file_cut_before_opening(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000]])
    os.truncate(tmp_path / "shard-0.bin", 12_000)
    with WeightStreamer(weights.layers, 2) as streamer:
        with streamer.layer(0) as tensors:
            weights.check(0, tensors)
        with pytest.raises(StorageError, match="ended early"):
            weights.run_passes(streamer)
    pinned = [LayerWeights(layer.tensors, frozenset(r.name for r in layer.tensors))
              for layer in weights.layers]  # fmt: skip
    with WeightStreamer(pinned, 0) as streamer, pytest.raises(StorageError, match="ended early"):
        weights.run_passes(streamer)


def test_overwriting_is_noticed_by_the_end_of_the_pass(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.run_passes(streamer, 2)
        path = tmp_path / "shard-0.bin"
        os.utime(path, ns=(1, 1))
        for _ in range(2):  # the error is persistent
            with pytest.raises(StorageError, match="changed while in use"):
                weights.run_passes(streamer)
        assert streamer.stats.passes == 2


def test_renaming_another_file_over_it_changes_nothing(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2) as streamer:
        (tmp_path / "other").write_bytes(b"x" * 5)
        (tmp_path / "other").rename(tmp_path / "shard-0.bin")
        weights.run_passes(streamer, 3)


def test_a_missing_file_leaves_nothing_open(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 100], [5000, 7]], n_files=2)
    (tmp_path / "shard-1.bin").unlink()
    gc.collect()
    before = n_open_files()
    with pytest.raises(StorageError, match="cannot open"):
        WeightStreamer(weights.layers, 2)
    gc.collect()
    assert n_open_files() == before


def test_resident_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]] * 4, resident=lambda i, j: True)
    reads = FaultyReads(lambda call, length: _raise_if(call == 2))
    with pytest.raises(StorageError, match="Input/output error"):
        load_resident(
            [r for layer in weights.layers for r in layer.tensors],
            read_bytes=PAGE,
            storage=reads.storage,
        )


CHILD = """
import sys
from pathlib import Path
from weight_files import write_weights
from offload.storage.direct_io import StorageError
from offload.ring.streamer import WeightStreamer

weights = write_weights(Path(sys.argv[1]), [[9000], [5000], [12000]])
n_good = n_bad = 0
with WeightStreamer(weights.layers, 2, read_bytes=4096, n_readers=1, poison=True) as streamer:
    while n_good < 3 and n_bad < 20:
        try:
            weights.run_passes(streamer)
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
    root = Path(__file__).parents[3]
    calls = "preadv,preadv2"
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}"]
    argv = [*strace, "-e", f"inject={calls}:{fault}", sys.executable, "-c", CHILD, str(tmp_path)]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this system does not allow tracing")
    assert done.returncode == 0, done.stderr
    assert output is None or done.stdout.strip() == output
