"""The order in which resident weights are read: none after a layer that needs it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.ring.background import by_need
from offload.storage.aligned import ALIGNMENT
from offload.storage.layout import make_layout

PAGE = ALIGNMENT


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
