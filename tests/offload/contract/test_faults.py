"""Storage that fails: every error surfaces once, and no wrong bytes get through."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from layer_suppliers import PAGE, SuppliedLayers, n_open_files
from paging import page_weights, small_weights
from streaming import Gate, wait_for_failure
from weight_files import FaultyReads, write_weights

from offload.storage.direct_io import DirectFile, Storage, StorageError

Kind = type[SuppliedLayers]


def fail_if(condition: bool) -> None:
    if condition:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("resume", [0, None])
def test_a_transient_error_at_every_read(tmp_path: Path, kind: Kind, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    for failing in range(-1, 36):
        reads = FaultyReads(lambda call, length, n=failing: fail_if(call == n))
        options = {"read_bytes": 2 * PAGE, "storage": reads.storage}
        with kind(weights, 1 + failing % 3, **options) as layers:
            assert layers.run_with_errors(4, resume) == (1 if failing >= 0 else 0)


def test_an_error_is_not_raised_again_once_storage_is_well(tmp_path: Path, kind: Kind) -> None:
    """The readers fail once more right after a restart, long before the next pass asks."""
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: fail_if(broken.is_set()))
    with kind(page_weights(tmp_path), 2, storage=reads.storage) as layers:
        broken.set()
        with pytest.raises(StorageError, match="Input/output error"):
            layers.run_passes(2)
        layers.access.restart()
        wait_for_failure(layers.access)
        broken.clear()
        layers.run_passes(2)


def test_nor_is_one_behind_a_layer_that_came(tmp_path: Path, kind: Kind) -> None:
    weights = write_weights(tmp_path, [[PAGE]] * 3, padding=PAGE)
    # After the restart layer 0 arrives (call 1), and layer 1 does not.
    reads = FaultyReads(lambda call, length: fail_if(call in (0, 2)))
    with kind(weights, 2, n_readers=1, storage=reads.storage) as layers:
        with pytest.raises(StorageError, match="Input/output error"):
            layers.enter(0)
        layers.access.restart()
        wait_for_failure(layers.access)
        layers.run_passes(2)


def test_what_failed_ahead_is_read_again_once(tmp_path: Path, kind: Kind) -> None:
    weights = write_weights(tmp_path, [[PAGE]] * 3, padding=PAGE)
    reads = FaultyReads(lambda call, length: fail_if(True))
    with kind(weights, 1, n_readers=1, storage=reads.storage) as layers:
        with pytest.raises(StorageError, match="Input/output error"):
            layers.enter(0)
        layers.access.restart()
        wait_for_failure(layers.access)
        before = reads.n_calls
        with pytest.raises(StorageError, match="Input/output error"):
            layers.enter(0)
        assert reads.n_calls == before + 1


def test_any_other_exception_of_a_reader_surfaces(tmp_path: Path, kind: Kind) -> None:
    def fault(call: int, length: int) -> None:
        if call == 4:
            raise RuntimeError("a bug")

    with kind(page_weights(tmp_path), 2, storage=FaultyReads(fault).storage) as layers:
        with pytest.raises(RuntimeError, match="a bug"):
            layers.run_passes()
        layers.run_passes(2)


def test_the_caller_can_end_the_wait_for_a_read_that_hangs(tmp_path: Path, kind: Kind) -> None:
    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    gate = Gate(n_open=3)
    with kind(page_weights(tmp_path), 2, n_readers=1, storage=gate.storage) as layers:
        with pytest.raises(Cancelled):
            layers.enter(0, cancel)
        gate.opened.set()
        layers.run_passes(2)


# --- files that change ----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 5000, 2 * PAGE, 8 * PAGE + 1])
def test_a_file_cut_while_running(tmp_path: Path, kind: Kind, cut: int) -> None:
    with kind(page_weights(tmp_path), 2) as layers:
        layers.run_passes()
        os.truncate(tmp_path / "shard-0.bin", cut)
        with pytest.raises(StorageError, match="ended early|changed while in use"):
            layers.run_passes(3)


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("end", [6 * PAGE, 6 * PAGE + 100])  # between reads, within one
def test_a_file_cut_before_opening(tmp_path: Path, kind: Kind, is_resident: bool, end: int) -> None:
    weights = write_weights(
        tmp_path, [[4 * PAGE]] * 4, padding=PAGE, resident=lambda i, j: is_resident
    )

    def cut(path: Path) -> Storage:
        os.truncate(path, end)
        return DirectFile(path)

    with kind(weights, 0 if is_resident else 2, storage=cut) as layers:
        if not is_resident:
            with layers.layer(0):
                pass
        with pytest.raises(StorageError, match="ended early|too short"):
            layers.run_passes()


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(path.read_bytes()[::-1])


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [overwrite, touch])
@pytest.mark.parametrize("num_pinned", [0, 3])
def test_overwriting_is_noticed_by_the_end_of_the_pass(
    tmp_path: Path, kind: Kind, change, num_pinned: int
) -> None:
    weights = page_weights(tmp_path)
    with kind(weights, 2) as layers:
        layers.access.set_num_pinned(num_pinned)
        layers.run_passes(2)
        assert layers.access.num_pinned == num_pinned
        change(tmp_path / "shard-0.bin")
        for _ in range(2):  # the error is persistent
            with pytest.raises(StorageError, match="changed while in use"):
                layers.run_unchecked()
        assert layers.access.stats.passes == 2


def test_renaming_another_file_over_it_changes_nothing(tmp_path: Path, kind: Kind) -> None:
    with kind(page_weights(tmp_path), 2) as layers:
        (tmp_path / "other").write_bytes(b"x" * 5)
        (tmp_path / "other").rename(tmp_path / "shard-0.bin")
        layers.run_passes(3)


def test_a_missing_file_leaves_nothing_open(tmp_path: Path, kind: Kind) -> None:
    weights = small_weights(tmp_path)  # two files

    def missing(path: Path) -> Storage:
        if path.name == "shard-1.bin":
            path.unlink()
        return DirectFile(path)

    before = n_open_files()
    with pytest.raises(StorageError, match="cannot open"):
        kind(weights, 2, storage=missing)
    assert n_open_files() == before
