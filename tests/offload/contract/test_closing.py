"""Closing at any moment: idempotent, and the end of all threads, waits and memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from layer_suppliers import SuppliedLayers
from paging import page_weights
from streaming import Gate, reader_threads
from weight_files import FaultyReads, Weights, write_weights

from offload.ring.slots import StreamerClosed

Kind = type[SuppliedLayers]


def partly_resident(folder: Path) -> Weights:
    return write_weights(folder, [[9000, 20_000]] * 6, n_files=2,
                         resident=lambda i, j: i % 2 == 0 or j == 0)  # fmt: skip


@pytest.mark.parametrize("write", [page_weights, partly_resident])
def test_closing_while_the_caller_waits(
    tmp_path: Path, kind: Kind, write: Callable[[Path], Weights]
) -> None:
    """For the ring, or for what stays in memory."""
    gate = Gate(0)
    with kind(write(tmp_path), 2, storage=gate.storage) as layers:
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                layers.access.enter(0)
            except BaseException as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        gate.reached.wait()
        closing = threading.Thread(target=layers.access.close)
        closing.start()
        waiting.join()
        assert isinstance(caught[0], StreamerClosed)
        gate.opened.set()
        closing.join()
        layers.check_closed()


def test_a_read_that_never_returns_does_not_block_closing(
    tmp_path: Path, kind: Kind, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("offload.ring.cursor.JOIN_SECONDS", 0.01)
    gate = Gate(0)
    with kind(page_weights(tmp_path), 2, storage=gate.storage) as layers:
        gate.reached.wait()
        with caplog.at_level(logging.WARNING):
            layers.access.close()
        assert "does not return" in caplog.text
        for index in range(5):
            layers.check_absent(index)
        gate.opened.set()  # the late read writes to memory that still exists
        for thread in reader_threads():
            thread.join()


@pytest.mark.parametrize("write", [page_weights, partly_resident])
@pytest.mark.parametrize("n_open", [2, 1000])
def test_a_forgotten_supplier_reads_no_further(
    tmp_path: Path, kind: Kind, write: Callable[[Path], Weights], n_open: int
) -> None:
    weights = write(tmp_path)
    gate = Gate(n_open)
    reads = FaultyReads(gate._fault)
    with kind(weights, 2, storage=reads.storage) as layers:
        if n_open == 1000:
            layers.run_passes()
        else:
            gate.reached.wait()
        layers.forget()
        n_calls = reads.n_calls
        gate.opened.set()
        for thread in reader_threads():
            thread.join(5)
        assert not reader_threads()
        assert reads.n_calls <= n_calls + 8  # one more of each reader


def test_a_close_while_the_files_are_checked_is_no_fault_of_the_files(
    tmp_path: Path, kind: Kind
) -> None:
    with kind(page_weights(tmp_path), 2) as layers:
        source = layers.access._cursor._source
        assert source is not None
        check = source.check_unchanged

        def close_and_check() -> None:
            layers.access.close()
            check()

        source.check_unchanged = close_and_check  # type: ignore[method-assign]
        with pytest.raises(StreamerClosed):
            layers.run_passes()
