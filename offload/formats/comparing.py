"""Whether two tensors of a model's files are the same."""

from __future__ import annotations

from collections.abc import Iterator

from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.units import MIB

_PIECE_BYTES = 4 * MIB


def have_same_bytes(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two plain tensors have the same form and bytes; stops at the first difference.

    Raises CheckpointError for a file that cannot be read.
    """
    if one == other:
        return True
    if one.scheme or (one.dtype, one.shape) != (other.dtype, other.shape) or other.scheme:
        return False
    return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(record: TensorRecord) -> Iterator[bytes]:
    try:
        for start in range(0, record.n_bytes, _PIECE_BYTES):
            n_bytes = min(_PIECE_BYTES, record.n_bytes - start)
            piece = read_part(record.path, record.offset + start, n_bytes)
            if len(piece) < n_bytes:
                raise CheckpointError(
                    f"{record.path} ended inside of {record.name}; download it again"
                )
            yield piece
    except OSError as error:
        raise CheckpointError(f"cannot read {record.path}: {error.strerror or error}") from error
