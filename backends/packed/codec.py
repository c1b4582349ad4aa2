"""What a packing scheme is, and which ones there are: our own, and those of quantised checkpoints.

A packed tensor's record (offload/formats/packed.py) has the dtype and shape of what is decoded, the
bytes of what is stored, and the name of the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from backends.packed.awq import Awq
from backends.packed.compressed_int4 import CompressedInt4
from backends.packed.fp8_blocks import Fp8Blocks
from backends.packed.gptq import Gptq
from backends.packed.tensor import DecodeRows, PackedTensor
from backends.packed.twelve_bits import TwelveBits
from offload.formats.safetensors import DTYPE_BITS
from offload.formats.tensors import CheckpointError, TensorRecord


class Codec(Protocol):
    """One scheme."""

    name: str
    """As records call it."""
    remedy: str
    """What to do about a tensor that is broken."""

    def check(self, tensor: PackedTensor) -> None:
        """Raise ValueError, which says why, where what headers say of it cannot be."""

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        """What decodes the rows of a tensor, in its number format.

        stored: uint8 [n_bytes] of each of its parts.

        Raises ValueError, which says why, for bytes that are no tensor of this scheme.
        """

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        """Memory that decoding takes beside."""

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of what a matrix [n_out, n_in] is stored as, to time decoding with."""


class Quantisation(Codec, Protocol):
    """A scheme that other libraries write; the settings of a model stand in its config.json."""

    method: str
    """Its `quant_method` there."""
    suffixes: tuple[str, ...]
    """Names of a matrix's parts behind that of the module, the main one first."""
    optional: tuple[str, ...]
    """Further parts that a matrix may have."""

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError, which names what is not known."""

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where a matrix that `check` passed is not what settings say of it."""

    def is_main(self, record: TensorRecord) -> bool:
        """Whether a tensor of the main name is quantised."""

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        """[n_out, n_in] of a matrix that has these parts."""


QUANTISATIONS: dict[str, Quantisation] = {
    one.method: one for one in (Fp8Blocks(), CompressedInt4(), Gptq(), Awq())
}
_REORDERED = Gptq(is_reordered=True)
_ALL: tuple[Codec, ...] = (TwelveBits(), *QUANTISATIONS.values(), _REORDERED)
CODECS = {codec.name: codec for codec in _ALL}


def example(scheme: str, shape: tuple[int, int]) -> PackedTensor:
    """A matrix, wherever it lies; `example_bytes` has its contents."""
    parts = [
        TensorRecord(str(i), dtype, size, Path(), 0, math.prod(size) * DTYPE_BITS[dtype] // 8)
        for i, (dtype, size) in enumerate(CODECS[scheme].example(shape))
    ]
    n_bytes = sum(part.n_bytes for part in parts)
    record = TensorRecord("", "BF16", shape, Path(), 0, n_bytes, scheme)
    return PackedTensor(record, tuple(parts))


def example_bytes(tensor: PackedTensor, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """uint8 [n_bytes] of each part of an `example`."""
    parts = [torch.zeros(x.n_bytes, dtype=torch.uint8, device=device) for x in tensor.parts]
    if tensor.record.scheme == _REORDERED.name:
        order = _REORDERED.example_order(tensor.record.shape[1])
        parts[-1].copy_(order.view(torch.uint8))
    return parts


def as_described(quantisation: Quantisation, settings: Mapping[str, Any]) -> Quantisation:
    """The same scheme, under a name of its own where settings say that decoding takes longer."""
    is_reordered = quantisation.method == Gptq.method and settings.get("desc_act") is True
    return _REORDERED if is_reordered else quantisation


def check_packed(tensor: PackedTensor) -> None:
    """Raise CheckpointError for a tensor whose scheme is not known, or of which headers alone tell
    that it is none of that scheme."""
    record = tensor.record
    is_ours = not tensor.stored  # metadata of ours name it, which can say anything
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
