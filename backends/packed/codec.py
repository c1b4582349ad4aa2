"""What a packing scheme is, and which ones there are.

A packed tensor's record (offload/formats/packed.py) has the dtype and shape of what is decoded, the
bytes of what is stored, and the name of the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from backends.packed.twelve_bits import DecodePiece, TwelveBits
from offload.formats.tensors import CheckpointError, TensorRecord


class Codec(Protocol):
    """One scheme."""

    name: str
    """As records call it."""
    number_format: str
    """What tensors are decoded into, as safetensors calls it."""
    itemsize: int
    """Bytes of a decoded weight."""
    piece_weights: int
    """That are decoded at a time: a few hundred microseconds."""

    def least_bytes(self, n_weights: int) -> int:
        """That so many weights are stored in."""

    def check_size(self, n_weights: int, n_bytes: int) -> None:
        """Raise ValueError, which says why, where so many bytes cannot be so many weights."""

    def opened(self, stored: np.ndarray, n_weights: int) -> DecodePiece:
        """What decodes a part of a tensor that is stored as these bytes (uint8).

        It is called with (start, end, out): the weights of which out (uint8) is to hold the bytes;
        start is a multiple of `piece_weights`. Threads may call it at the same time.

        Raises ValueError, which says why, for bytes that are no tensor of this scheme.
        """


CODECS: dict[str, Codec] = {codec.name: codec for codec in (TwelveBits(),)}


def decoded_bytes(record: TensorRecord) -> int:
    """Of a tensor when it is computed with; its scheme, if it has one, is known."""
    if not record.scheme:
        return record.n_bytes
    return math.prod(record.shape) * CODECS[record.scheme].itemsize


def check_packed(records: Iterable[TensorRecord]) -> None:
    """Raise CheckpointError for a packed tensor whose scheme is not known, or of which its size
    alone tells that it is none of that scheme."""
    for record in records:
        if not record.scheme:
            continue
        codec = CODECS.get(record.scheme)
        if codec is None:
            raise CheckpointError(
                f"{record.path}: tensor {record.name[:200]!r} is packed as {record.scheme}, and "
                f"only {', '.join(CODECS)} is known: take a newer specdec, or pack the model again"
            )
        try:
            if record.dtype != codec.number_format:
                raise ValueError(f"it holds {codec.number_format}, not {record.dtype}")
            codec.check_size(math.prod(record.shape), record.n_bytes)
        except ValueError as error:
            raise broken(record, error) from error


def broken(record: TensorRecord, why: ValueError) -> CheckpointError:
    return CheckpointError(
        f"{record.path}: tensor {record.name[:200]!r} is no {record.scheme} tensor: {why}; "
        "pack the model again"
    )
