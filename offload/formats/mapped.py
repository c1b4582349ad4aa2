"""Safetensors files whose tensors are written in place, through mappings.

Nothing is in memory twice: tensors are written to the file's pages, each mapped only while it is
used. A file is written under a temporary name and renamed when it is complete and on the disk, so
that no process sees a partial one. Its metadata have the CRC-32 of each piece of its tensors, which
are compared when it is read (see `CheckedTensors`): against damage, as in file systems, and not
against whoever may write to the folder.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from offload.formats.safetensors import DTYPE_BITS
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.units import MIB

_ALIGNMENT = 64
PIECE_BYTES = 4 * MIB
"""Distance of the borders of pieces; a tensor's first and last piece are shorter."""
_CHECKSUMS_KEY = "crc32"
_DIGITS = 8
_NO_DIGITS = "0" * _DIGITS
_CHECKSUM = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a file to be written."""

    name: str
    dtype: str  # safetensors' name: "BF16", "U8", ...
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n_bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            n_bits *= size
        return n_bits // 8


class LazyMapping(Mapping[str, _T]):
    """Values that are made when they are accessed, and not cached."""

    def __init__(self, names: Mapping[str, object], make: Callable[[str], _T]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> _T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def file_bytes(tensors: Sequence[TensorShape], metadata: Mapping[str, str]) -> int:
    """Return the size of the file that `write_mapped` writes."""
    n_header = len(_empty_header(_in_order(tensors), metadata))
    return n_header + sum(tensor.n_bytes for tensor in tensors)


def write_mapped(
    path: Path,
    tensors: Sequence[TensorShape],
    metadata: Mapping[str, str],
    fill: Callable[[Mapping[str, memoryview]], None],
) -> None:
    """Let `fill` write every tensor's bytes; then replace `path` by the file.

    Raises:
        OSError: no space, no permission.
        Any exception of `fill`. `path` is unchanged then.
    """
    place = Path(os.path.realpath(path))  # a link stays a link
    tensors = _in_order(tensors)
    header = _empty_header(tensors, metadata)
    n_bytes = len(header) + sum(tensor.n_bytes for tensor in tensors)
    descriptor, aside = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)  # a full disk would raise SIGBUS later
            buffers = _buffers(descriptor, len(header), tensors)
            fill(buffers)
            digits = _digits(buffers, len(header), tensors)
            os.pwrite(descriptor, _header(tensors, metadata, digits), 0)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(aside, place)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    _sync_folder(place.parent)


def pieces_of(offset: int, n_bytes: int) -> list[tuple[int, int]]:
    """Return the pieces of a tensor that have a checksum each, as (first, end) byte of the file."""
    end = offset + n_bytes
    borders = [offset, *range(offset - offset % PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES), end]
    return list(pairwise(borders)) if n_bytes else []


def checksums(
    path: Path, metadata: Mapping[str, str], records: Iterable[TensorRecord]
) -> dict[str, list[int]]:
    """Return the checksums of each tensor's pieces. records: in the order of the file.

    Raises CheckpointError if another program has written the file.
    """
    digits = metadata.get(_CHECKSUMS_KEY, "")
    result, start = {}, 0
    for record in records:
        pieces = pieces_of(record.offset, record.n_bytes)
        numbers = [digits[start + _DIGITS * i :][:_DIGITS] for i in range(len(pieces))]
        if not all(map(_CHECKSUM.fullmatch, numbers)):
            raise CheckpointError(f"{path} was written by another program")
        result[record.name] = [int(number, 16) for number in numbers]
        start += _DIGITS * _max_num_pieces(record.n_bytes)
    return result


def _max_num_pieces(n_bytes: int) -> int:
    """Return the number of pieces wherever the tensor begins, for a header of a known size."""
    return (n_bytes + PIECE_BYTES - 2) // PIECE_BYTES + 1 if n_bytes else 0


def _in_order(tensors: Sequence[TensorShape]) -> list[TensorShape]:
    """Return the widest dtypes first, so that each tensor is aligned to its dtype."""
    return sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])


def _header(tensors: Sequence[TensorShape], metadata: Mapping[str, str], digits: str) -> bytes:
    """Return length, JSON and padding for aligned data."""
    table: dict[str, object] = {"__metadata__": {**metadata, _CHECKSUMS_KEY: digits}}
    position = 0
    for tensor in tensors:
        end = position + tensor.n_bytes
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _empty_header(tensors: Sequence[TensorShape], metadata: Mapping[str, str]) -> bytes:
    """Return a header of its final size, without checksums."""
    num_pieces = sum(_max_num_pieces(tensor.n_bytes) for tensor in tensors)
    return _header(tensors, metadata, _NO_DIGITS * num_pieces)


def _digits(
    buffers: Mapping[str, memoryview], position: int, tensors: Sequence[TensorShape]
) -> str:
    """Return the checksums of all pieces, in the order of the file, from `position` on."""
    digits = ""
    for tensor, (offset, n_bytes) in zip(tensors, _places(tensors, position), strict=True):
        content = buffers[tensor.name]
        sums = [
            f"{zlib.crc32(content[first - offset : end - offset]):0{_DIGITS}x}"
            for first, end in pieces_of(offset, n_bytes)
        ]
        digits += "".join(sums).ljust(_DIGITS * _max_num_pieces(n_bytes), "0")
    return digits


def _places(tensors: Sequence[TensorShape], position: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each tensor, from `position` on."""
    places = []
    for tensor in tensors:
        places.append((position, tensor.n_bytes))
        position += tensor.n_bytes
    return places


def _buffers(
    descriptor: int, position: int, tensors: Sequence[TensorShape]
) -> Mapping[str, memoryview]:
    """Return the bytes of each tensor, mapped at every access, from `position` on."""
    names = (tensor.name for tensor in tensors)
    places = dict(zip(names, _places(tensors, position), strict=True))
    return LazyMapping(places, lambda name: _mapped(descriptor, *places[name]))


def _mapped(descriptor: int, offset: int, n_bytes: int) -> memoryview:
    """Map bytes of a file; they are unmapped when the last reference to them is gone."""
    if not n_bytes:
        return memoryview(bytearray())
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(descriptor, offset + n_bytes - start, access=mmap.ACCESS_WRITE, offset=start)
    return memoryview(pages)[offset - start :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
