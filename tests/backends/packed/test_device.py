"""A device decodes to the same bits with torch; a broken tensor is reported after the pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_engine import CpuEngine
from device_talk import ENGINES, NEEDS_CUDA, conversation, on_device
from packed_models import save_packable
from packed_tensors import packed, weights_of
from quantised_models import compressed, fp8, gptq, save_quantised

from backends.contract.source import BackendOptions
from backends.cuda.source import HfGpuSource
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from backends.packed import device as on_a_device
from backends.packed.decoder import PackedModule
from backends.packed.device import DeviceDecoder
from backends.packed.tensor import PackedTensor
from backends.packed.timing import _time_on_device
from backends.packed.twelve_bits import Planes, TwelveBits
from offload.formats.tensors import CheckpointError, TensorRecord
from specdec.packing.pack import pack

DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA]),
]
SETTINGS = {"num_bits": 4, "type": "int", "strategy": "group"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"all": {"weights": SETTINGS}},
}
KINDS = {
    "fp8": (fp8(), {"quant_method": "fp8", "weight_block_size": [128, 128]}, torch.bfloat16),
    "int4": (compressed(is_symmetric=False), INT4, torch.bfloat16),
    "gptq": (gptq(is_reordered=True), {"quant_method": "gptq", "bits": 4}, torch.float16),
}


def decoder_of(tensor: PackedTensor, device: str) -> DeviceDecoder:
    return DeviceDecoder(
        [PackedModule((tensor,))],
        lambda n: torch.full((n,), 0xAA, dtype=torch.uint8, device=device),
    )


def tensor_of(stored: np.ndarray, n_weights: int) -> PackedTensor:
    record = TensorRecord("layers.0.up", "BF16", (n_weights,), Path("m"), 0, len(stored), "BF16_12")
    return PackedTensor(record)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_weights", [1, 513, 1024, 5000])
def test_twelve_bits_are_the_same_bits(
    device: str, n_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_a_device, "_PIECE_WEIGHTS", 2048)
    weights = weights_of(n_weights, n_weights, [0, 1, 110, 111, 125, 126, 255])
    stored = packed(TwelveBits(), weights, 110)
    item = tensor_of(stored, n_weights)
    decoder = decoder_of(item, device)
    (actual,) = decoder.decode([item], [[torch.from_numpy(stored).to(device)]])
    np.testing.assert_array_equal(actual.view(torch.int16).cpu().numpy().view(np.uint16), weights)
    decoder.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["base", "count", "position", "order", "header", "code"])
def test_broken_tensors_are_reported(device: str, place: str) -> None:
    weights = weights_of(0, 5000, [120])
    weights[[7, 9]] = 0x7F80
    stored = packed(TwelveBits(), weights, 110)
    if place == "base":
        stored[0] = 255
    elif place == "count":
        stored[8] += 1
    elif place == "header":
        stored[63] = 1
    elif place == "code":
        stored[Planes(5000).codes + 7] |= 3
    else:
        stored[-7] = 0xFF if place == "position" else 1
        stored[-6] = 0xFF if place == "position" else 0
    item = tensor_of(stored, 5000)
    decoder = decoder_of(item, device)
    decoder.decode([item], [[torch.from_numpy(stored).to(device)]])
    message = (
        r"'layers.0.up' is no BF16_12 tensor: its base is above 240, its \d+ exceptions do not "
    )
    with pytest.raises(CheckpointError, match=message + "ascend within 5000 weights"):
        decoder.check()
    decoder.check()  # reported once


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("kind", ["packed", *KINDS])
def test_a_device_computes_what_the_plain_model_does(kind, make, tmp_path: Path) -> None:
    engine = make()
    is_fake = isinstance(engine, CpuEngine)
    if kind == "packed":
        plain = save_packable("llama", tmp_path / "plain")
        stored = pack(plain, tmp_path / "packed").path
    else:
        stored, plain = save_quantised(tmp_path, *KINDS[kind])
    with on_device(plain, make()) as backend:
        expected = conversation(backend)
    with on_device(stored, engine) as backend:
        for item, other in zip(conversation(backend), expected, strict=True):
            np.testing.assert_array_equal(item, other)
    if is_fake:
        assert (engine.n_allocated, engine.n_pinned) == (0, 0)
        with TorchBackend.resident(plain) as backend:
            for item, other in zip(conversation(backend), expected, strict=True):
                np.testing.assert_array_equal(item, other)


def test_a_plan_for_a_gpu_knows_the_buffer(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    own, other = (
        HfGpuSource(HfSource(path, BackendOptions()))
        for path in (pack(plain, tmp_path / "packed").path, plain)
    )
    largest = max(r.n_bytes for layer in other.layers for r in layer.tensors)
    assert own.non_layer_bytes >= other.non_layer_bytes + largest


def test_decoding_on_a_device_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.packed import timing

    monkeypatch.setattr(timing, "_SHAPE", (128, 512))
    assert _time_on_device("BF16_12", torch.device("cpu")).seconds(1) > 0
