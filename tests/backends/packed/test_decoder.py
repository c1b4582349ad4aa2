"""Packed tensors of modules share one decode buffer; broken ones are refused."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Event, Timer

import numpy as np
import pytest
import torch
from packed_tensors import packed, weights_of

from backends.packed.codec import check_packed
from backends.packed.decoder import Decoder, PackedModule, decode_buffer_bytes
from backends.packed.tensor import PackedTensor
from backends.packed.twelve_bits import TwelveBits
from offload.formats.tensors import CheckpointError, TensorRecord


def tensor(name: str, n_weights: int, n_bytes: int, scheme: str = "BF16_12") -> PackedTensor:
    path = Path("m.safetensors")
    return PackedTensor(TensorRecord(name, "BF16", (n_weights,), path, 0, n_bytes, scheme))


@pytest.mark.parametrize("n_threads", [1, 3])
def test_modules_are_decoded_one_after_the_other(n_threads: int) -> None:
    weights = [weights_of(i, n, [0, 118, 120, 255]) for i, n in enumerate((5000, 777, 9001))]
    stored = [packed(TwelveBits(), w, 110) for w in weights]
    tensors = [tensor(str(i), len(w), len(stored[i])) for i, w in enumerate(weights)]
    modules = [PackedModule(tuple(tensors[:2])), PackedModule(tuple(tensors[2:]))]
    decoder = Decoder(modules, n_threads)
    try:
        beside = [TwelveBits().scratch_bytes(item) for item in tensors]
        assert min(beside) > 0
        assert decode_buffer_bytes(modules, n_threads) == decoder.n_bytes + max(beside)
        for module in modules * 2:
            numbers = [int(item.record.name) for item in module.tensors]
            actual = decoder.decode(
                module.tensors, [[torch.from_numpy(stored[i])] for i in numbers]
            )
            for i, out in zip(numbers, actual, strict=True):
                np.testing.assert_array_equal(
                    out.view(torch.int16).numpy().view(np.uint16), weights[i]
                )
    finally:
        decoder.close()
    assert decode_buffer_bytes([], n_threads) == 0
    assert decode_buffer_bytes(modules, n_threads) >= 2 * 9001


def test_broken_tensors_are_refused_by_name() -> None:
    stored = packed(TwelveBits(), weights_of(0, 5000, [120]), 110)
    stored[0] = 255
    item = tensor("layers.0.up", 5000, len(stored))
    decoder = Decoder([PackedModule((item,))], 1)
    try:
        with pytest.raises(CheckpointError, match=r"'layers.0.up' is no BF16_12.*base is 255"):
            decoder.decode([item], [[torch.from_numpy(stored)]])
    finally:
        decoder.close()


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (tensor("a", 5000, 7745), "5000 weights take 7744 bytes and 8 for each of at most 50"),
        (tensor("a", 5000, 10_000, "FP8_BLOCKS"), "packed as FP8_BLOCKS, and only BF16_12"),
        (
            PackedTensor(TensorRecord("a", "F16", (5000,), Path("m"), 0, 7744, "BF16_12")),
            "it holds BF16, not F16",
        ),
    ],
)
def test_what_a_header_alone_tells_is_refused(item: PackedTensor, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        check_packed(item)
    assert "\n" not in str(caught.value)


def test_ctrl_c_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads write to the buffer and read weights that are freed next."""
    decoder, go, done = Decoder([], 2), Event(), []

    def work() -> None:
        go.wait()
        done.append(1)

    def interrupted(*_: object) -> None:
        Timer(0.1, go.set).start()
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Future, "exception", interrupted)
            with pytest.raises(KeyboardInterrupt):
                decoder._run([lambda: None, work, work])
        assert done == [1, 1]
    finally:
        decoder.close()
