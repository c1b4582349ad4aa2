"""Interface and registry of packing schemes: our own, and those of quantised checkpoints.

A packed tensor's record (offload/formats/packed.py) has the dtype and shape of the decoded tensor,
the size of the stored one, and the name of the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from backends.packed.awq import Awq
from backends.packed.compressed_int4 import CompressedInt4
from backends.packed.float4 import Float4, StackedMxfp4
from backends.packed.fp8_blocks import CompressedFp8, Fp8Blocks
from backends.packed.gptq import Gptq
from backends.packed.kernels import tile_products
from backends.packed.tensor import DecodeRows, PackedTensor
from backends.packed.twelve_bits import TwelveBits
from backends.tiles.stored import Table
from offload.formats.safetensors import DTYPE_BITS
from offload.formats.tensors import CheckpointError, TensorRecord


class Codec(Protocol):
    """One packing scheme."""

    name: str
    """Name of the scheme in records."""
    remedy: str
    """Advice for a broken tensor, used in error messages."""

    def check(self, tensor: PackedTensor) -> None:
        """Raise ValueError with a reason if the headers describe no valid tensor."""

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        """Return a function that decodes rows of a tensor on a device, by torch.

        stored: uint8 [n_bytes] of each of its parts.

        Raises ValueError with a reason for bytes that are no tensor of this scheme.
        """

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        """Return what the compiled decoder takes, which writes weights as `written` says.

        stored, errors: see `open`.
        """

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        """Return the temporary memory of decoding."""

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        """Return (dtype, shape) of the stored parts of a matrix [n_out, n_in], for timing."""


class Quantisation(Codec, Protocol):
    """A scheme that other libraries write, with its settings in the model's config.json."""

    method: str
    """Value of `quant_method` in the settings."""
    suffixes: tuple[str, ...]
    """Suffixes of a matrix's parts after the module's name, the main one first."""
    optional: tuple[str, ...]
    """Suffixes of parts that a matrix may have in addition."""

    separator: str
    """Text between the module's name and a suffix."""
    whole: str
    """Text after the module's name in the name of the decoded parameter."""
    n_dims: int
    """Dimensions of the main part."""

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError that names an unsupported setting."""

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if a matrix that passed `check` contradicts the settings."""

    def is_main(self, record: TensorRecord) -> bool:
        """Return whether a tensor with the main suffix is quantised."""

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        """Return [n_out, n_in] of a matrix that has these parts."""


_STACKED = StackedMxfp4()
QUANTISATIONS: dict[str, Quantisation] = {
    method.method: method for method in (Fp8Blocks(), CompressedInt4(), Gptq(), Awq(), _STACKED)
}
_COMPRESSED: dict[str, Quantisation] = {
    method.file_format: method
    for method in (
        CompressedFp8(),
        Float4("NVFP4", "nvfp4-pack-quantized", "F8_E4M3"),
        Float4("MXFP4", "mxfp4-pack-quantized", "U8"),
    )
}
_REORDERED = Gptq(is_reordered=True)
_ALL: tuple[Codec, ...] = (
    TwelveBits(), *QUANTISATIONS.values(), *_COMPRESSED.values(), _REORDERED
)  # fmt: skip
CODECS = {codec.name: codec for codec in _ALL}


def example(scheme: str, shape: tuple[int, int]) -> PackedTensor:
    """Return a matrix without a file for timing; `example_bytes` has its contents."""
    parts = [
        TensorRecord(str(i), dtype, size, Path(), 0, math.prod(size) * DTYPE_BITS[dtype] // 8)
        for i, (dtype, size) in enumerate(CODECS[scheme].example(shape))
    ]
    n_bytes = sum(part.n_bytes for part in parts)
    record = TensorRecord("", "BF16", shape, Path(), 0, n_bytes, scheme)
    return PackedTensor(record, tuple(parts))


def example_bytes(tensor: PackedTensor, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Return uint8 [n_bytes] of each part of an `example`."""
    parts = [torch.zeros(x.n_bytes, dtype=torch.uint8, device=device) for x in tensor.parts]
    if tensor.record.scheme == _REORDERED.name:
        order = _REORDERED.example_order(tensor.record.shape[1])
        parts[-1].copy_(order.view(torch.uint8))
    return parts


def load_decoders(schemes: Collection[str]) -> None:
    """Compile the products and decoders of these schemes, or load them from numba's cache.

    Raises UnsupportedModel if numba is missing.
    """
    if not schemes:
        return
    products = tile_products()
    for scheme in schemes:
        tensor = example(scheme, (128, 128))
        CODECS[scheme].table(tensor, example_bytes(tensor), products.MULTIPLIED[torch.bfloat16])


def as_described(quantisation: Quantisation, settings: Mapping[str, Any]) -> Quantisation:
    """Return the scheme of the settings' format, with a different name if they make decoding
    slower."""
    if quantisation.method == CompressedInt4.method:
        return _COMPRESSED.get(str(settings.get("format")), quantisation)
    is_reordered = quantisation.method == Gptq.method and settings.get("desc_act") is True
    return _REORDERED if is_reordered else quantisation


def check_packed(tensor: PackedTensor) -> None:
    """Raise CheckpointError for a tensor of an unknown scheme, or whose headers do not fit its
    scheme."""
    record = tensor.record
    is_ours = not tensor.stored  # the scheme is named by the file's metadata, so it may be unknown
    if is_ours and record.scheme != TwelveBits.name:
        raise CheckpointError(
            f"{record.path}: tensor {record.name[:200]!r} is packed as {record.scheme}, and "
            f"only {TwelveBits.name} is known: take a newer specdec, or pack the model again"
        )
    try:
        CODECS[record.scheme].check(tensor)
    except ValueError as error:
        raise broken(record, error) from error


def broken(record: TensorRecord, why: ValueError) -> CheckpointError:
    return CheckpointError(
        f"{record.path}: tensor {record.name[:200]!r} is no {record.scheme} tensor: {why}; "
        f"{CODECS[record.scheme].remedy}"
    )
