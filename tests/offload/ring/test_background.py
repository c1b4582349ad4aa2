"""Resident weights are read during the first pass: none is used before it is loaded."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_files import n_open_files
from streaming import Gate, reader_threads, uneven_sizes
from weight_files import FaultyReads, Weights, write_weights

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.ring.background import by_need
from offload.ring.streamer import StreamerClosed, WeightStreamer
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError
from offload.storage.layout import make_layout

PAGE = ALIGNMENT
N_LAYERS = 6
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Every second layer is resident, and a part of each other one."""
    sizes = [[*layer, 20_000] for layer in uneven_sizes(N_LAYERS, 3, limit=30_000)]
    return write_weights(tmp_path, sizes, n_files=2, resident=lambda i, j: i % 2 == 0 or j == 0)


def streamer(weights: Weights, reads: FaultyReads | Gate | None = None) -> WeightStreamer:
    storage = (reads or FaultyReads()).storage
    return WeightStreamer(weights.layers, 2, read_bytes=PAGE, n_readers=2, storage=storage)


def all_resident(weights: Weights) -> Weights:
    names = [frozenset(record.name for record in layer.tensors) for layer in weights.layers]
    layers = [
        LayerWeights(item.tensors, cached)
        for item, cached in zip(weights.layers, names, strict=True)
    ]
    return Weights(tuple(layers), weights.contents)


def n_reads(weights: Weights) -> int:
    """Return the number of reads of one load with a pass."""
    counting = FaultyReads()
    with streamer(weights, counting) as walked:
        weights.run_passes(walked)
    return counting.n_calls


# --- order of need --------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[TensorRecord, int]]:
    """Tensors of one file in any order of layers, with gaps; layer -1 has the non-layer ones."""
    actual, offset = [], draw(st.integers(0, 100))
    for number in range(draw(st.integers(1, 12))):
        n_bytes = draw(st.sampled_from([0, 1, 4096, 5000, 20_000]))
        record = TensorRecord(str(number), "U8", (n_bytes,), Path("file"), offset, n_bytes)
        actual.append((record, draw(st.integers(-1, 3))))
        offset += n_bytes + draw(st.sampled_from([0, 0, 1, 9000]))
    return actual


@given(tensors(), st.sampled_from([PAGE, 4 * PAGE]))
def test_no_piece_comes_after_a_layer_that_needs_it(actual, read_bytes) -> None:
    layers = [
        LayerWeights(tuple(record for record, layer in actual if layer == number))
        for number in range(4)
    ]
    layout = make_layout((record for record, _ in actual), merge_gap=0)
    turns = by_need(
        layout.pieces(read_bytes), layers, [record for record, layer in actual if layer < 0]
    )
    assert [read_chunk for _, read_chunk in turns] == list(layout.pieces(read_bytes))
    for record, layer in actual:
        for slot_turn, read_chunk in turns:
            start, end = read_chunk.file_offset, read_chunk.file_offset + read_chunk.n_bytes
            if record.offset < end and start < record.offset + record.n_bytes:
                assert slot_turn <= max(layer, 0)


# --- the first pass -------------------------------------------------------------------------------


def test_a_layer_is_there_before_those_after_it_are_read(weights: Weights) -> None:
    weights = all_resident(weights)
    layout = make_layout((r for layer in weights.layers for r in layer.tensors), merge_gap=0)
    turns = [slot_turn for slot_turn, _ in by_need(layout.pieces(PAGE), weights.layers)]
    gate = Gate(n_open=turns.count(0) + turns.count(1))
    with streamer(weights, gate) as walked:
        weights.run_passes(walked, stop_before=2)
        assert walked.unread_bytes > 0
        gate.opened.set()
        weights.run_passes(walked, 2)
        assert walked.unread_bytes == 0


def test_they_are_read_once(weights: Weights) -> None:
    weights = all_resident(weights)
    counting = FaultyReads()
    with streamer(weights, counting) as walked:
        weights.run_passes(walked)
        n_first = counting.n_calls
        weights.run_passes(walked, 2)
    assert counting.n_calls == n_first


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_read_that_fails_is_made_again(tmp_path_factory, data) -> None:
    """Any read may fail, any number of times: no pass has wrong bytes, and one finally succeeds."""
    sizes = uneven_sizes(4, data.draw(st.integers(0, 5)), limit=20_000)
    weights = write_weights(
        tmp_path_factory.mktemp("weights"), sizes, resident=lambda i, j: (i + j) % 2 == 0
    )
    failing = data.draw(st.sets(st.integers(0, 12), max_size=4))

    def fault(call: int, length: int) -> None:
        if call in failing:
            raise OSError(5, "Input/output error")

    with streamer(weights, FaultyReads(fault)) as walked:
        for n_left in range(len(failing), -1, -1):
            if n_left == 0:
                failing.clear()  # the read-ahead may have failed already
            try:
                weights.run_passes(walked)
            except StorageError:
                continue
        weights.run_passes(walked, 2)


def test_an_overwritten_file_ends_the_first_pass(weights: Weights) -> None:
    weights = all_resident(weights)
    gate = Gate(n_open=n_reads(weights) - 1)
    with streamer(weights, gate) as walked:
        weights.run_passes(walked, stop_before=2)
        os.utime(weights.layers[0].tensors[0].path, ns=(1, 1))
        gate.opened.set()
        for _ in range(2):
            with pytest.raises(StorageError, match="changed while in use"):
                weights.run_passes(walked)
        assert walked.stats.passes == 0


def test_what_the_caller_raises_ends_the_wait(weights: Weights) -> None:
    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    gate = Gate(n_open=0)
    with streamer(weights, gate) as walked:
        with pytest.raises(Cancelled), walked.layer(0, cancel):
            pass
        gate.opened.set()
        weights.run_passes(walked, 2)


# --- closing --------------------------------------------------------------------------------------


def test_closing_in_the_middle(weights: Weights) -> None:
    gc.collect()
    n_files = n_open_files()
    gate = Gate(n_open=2)
    walked = streamer(weights, gate)
    gate.reached.wait()
    closing = threading.Thread(target=walked.close)
    closing.start()
    with pytest.raises(StreamerClosed):
        weights.run_passes(walked)
    gate.opened.set()
    closing.join()
    assert not reader_threads()
    assert n_open_files() == n_files


def test_a_streamer_that_nobody_refers_to_reads_no_further(weights: Weights) -> None:
    n_needed = n_reads(weights)
    gate = Gate(n_open=2)
    counting = FaultyReads(gate._fault)
    walked = streamer(weights, counting)
    gate.reached.wait()
    del walked
    gc.collect()
    gate.opened.set()
    for thread in reader_threads():
        thread.join()
    assert counting.n_calls < n_needed


def test_files_are_closed_after_the_first_pass(weights: Weights) -> None:
    weights = all_resident(weights)
    gc.collect()
    n_files = n_open_files()
    with streamer(weights) as walked:
        weights.run_passes(walked)
        assert n_open_files() == n_files
