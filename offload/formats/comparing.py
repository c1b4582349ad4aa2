"""Comparison of two tensors of a model's files."""

from __future__ import annotations

from collections.abc import Iterator

from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.units import MIB

_PIECE_BYTES = 4 * MIB


def have_same_bytes(item: TensorRecord, other: TensorRecord) -> bool:
    """Return whether two plain tensors have the same form and bytes; stop at the first difference.

    Raises CheckpointError for a file that cannot be read.
    """
    if item == other:
        return True
    if item.scheme or (item.dtype, item.shape) != (other.dtype, other.shape) or other.scheme:
        return False
    return all(a == b for a, b in zip(_pieces(item), _pieces(other), strict=True))


def _pieces(record: TensorRecord) -> Iterator[bytes]:
    try:
        for start in range(0, record.n_bytes, _PIECE_BYTES):
            n_bytes = min(_PIECE_BYTES, record.n_bytes - start)
            read_chunk = read_part(record.path, record.offset + start, n_bytes)
            if len(read_chunk) < n_bytes:
                raise CheckpointError(
                    f"{record.path} ended inside of {record.name}; download it again"
                )
            yield read_chunk
    except OSError as error:
        raise CheckpointError(f"cannot read {record.path}: {error.strerror or error}") from error
