"""A layer's packed tensors are decoded into one buffer; a broken one is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from packed_tensors import packed, weights_of

from backends.packed.codec import check_packed
from backends.packed.layers import LayerDecoder, decode_buffer_bytes
from backends.packed.twelve_bits import TwelveBits
from offload.formats.tensors import CheckpointError, TensorRecord


def record(name: str, n_weights: int, n_bytes: int, scheme: str = "BF16_12") -> TensorRecord:
    return TensorRecord(name, "BF16", (n_weights,), Path("m.safetensors"), 0, n_bytes, scheme)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_layers_are_decoded_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, n_threads: int
) -> None:
    monkeypatch.setattr(TwelveBits, "piece_weights", 2048)  # several pieces of each
    weights = [weights_of(i, n, [0, 118, 120, 255]) for i, n in enumerate((5000, 777, 9001))]
    stored = [packed(TwelveBits(), w, 110) for w in weights]
    records = [record(str(i), len(w), len(stored[i])) for i, w in enumerate(weights)]
    plain = TensorRecord("norm", "BF16", (8,), Path("m.safetensors"), 0, 16)
    layers = [[records[0], plain, records[1]], [plain], [records[2]]]
    decoder = LayerDecoder(layers, n_threads)
    try:
        assert [decoder.decodes(i) for i in range(3)] == [True, False, True]
        for _ in range(2):
            for index, layer in enumerate(layers):
                found = decoder.decode(
                    index, {r.name: stored[int(r.name)].data for r in layer if r.scheme}
                )
                assert set(found) == {r.name for r in layer if r.scheme}
                for name, view in found.items():
                    np.testing.assert_array_equal(
                        np.frombuffer(view, np.uint16), weights[int(name)]
                    )
    finally:
        decoder.close()
    assert decode_buffer_bytes([plain]) == 0
    assert decode_buffer_bytes(layers[2]) >= 2 * 9001


def test_broken_tensors_are_refused_by_name() -> None:
    stored = packed(TwelveBits(), weights_of(0, 5000, [120]), 110)
    stored[0] = 255
    decoder = LayerDecoder([[record("layers.0.up", 5000, len(stored))]], 1)
    try:
        with pytest.raises(CheckpointError, match=r"'layers.0.up' is no BF16_12.*base is 255"):
            decoder.decode(0, {"layers.0.up": stored.data})
    finally:
        decoder.close()


@pytest.mark.parametrize(
    ("one", "match"),
    [
        (record("a", 5000, 7745), "5000 weights take 7744 bytes and 8 for each exception"),
        (record("a", 5000, 10_000, "FP8_BLOCKS"), "packed as FP8_BLOCKS, and only BF16_12"),
        (
            TensorRecord("a", "F16", (5000,), Path("m"), 0, 7744, "BF16_12"),
            "it holds BF16, not F16",
        ),
    ],
)
def test_what_a_header_alone_tells_is_refused(one: TensorRecord, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        check_packed([one])
    assert "\n" not in str(caught.value)
