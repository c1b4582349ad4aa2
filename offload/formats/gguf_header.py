"""The header of one GGUF file, an untrusted input.

File format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian: "GGUF",
u32 version, u64 number of tensors, u64 number of key-value pairs, the pairs, then for each tensor
its name, u32 number of dimensions, u64 sizes (the contiguous one first), u32 type, u64 offset
relative to the data; padding up to the alignment; the data. Every number is checked before it is
used. The rules are llama.cpp's (tensors follow each other without holes, names shorter than 64
bytes, no arrays of arrays), so that a file accepted here loads there.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, cast

from offload.formats.gguf_metadata import (
    DAMAGED,
    MAX_METADATA,
    Cursor,
    GgufError,
    GgufMetadata,
    read_metadata,
)
from offload.formats.lfs import refuse_pointer
from offload.formats.tensors import FileState, TensorRecord
from offload.units import MIB, format_bytes

__all__ = ["GGML_TYPES", "GgmlType", "GgufError", "GgufFile", "GgufMetadata", "row_bytes"]

MAX_TENSORS = 2**16  # a large model has about 2,000
MAX_NAME_BYTES = 63  # ggml's buffer of 64 includes a final zero
MAX_RANK = 4
MAX_ALIGNMENT = MIB
DEFAULT_ALIGNMENT = 32
VERSIONS = (2, 3)
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8


class GgmlType(NamedTuple):
    """`block_size` neighbouring elements of a row are packed into `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


# ggml.h, enum ggml_type, and the block structs of ggml-common.h. The numbers left out were types
# of old versions: 4, 5 (Q4_2, Q4_3), 31-33 and 36-38 (repacked Q4_0 and IQ4_NL).
GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType({
    0: GgmlType("F32", 1, 4), 1: GgmlType("F16", 1, 2), 30: GgmlType("BF16", 1, 2),
    28: GgmlType("F64", 1, 8), 24: GgmlType("I8", 1, 1), 25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4), 27: GgmlType("I64", 1, 8),
    2: GgmlType("Q4_0", 32, 18), 3: GgmlType("Q4_1", 32, 20), 6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24), 8: GgmlType("Q8_0", 32, 34), 9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84), 11: GgmlType("Q3_K", 256, 110), 12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176), 14: GgmlType("Q6_K", 256, 210), 15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66), 17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98), 19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18), 21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82), 23: GgmlType("IQ4_XS", 256, 136),
    29: GgmlType("IQ1_M", 256, 56), 34: GgmlType("TQ1_0", 256, 54), 35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17), 40: GgmlType("NVFP4", 64, 36), 41: GgmlType("Q1_0", 128, 18),
})  # fmt: skip
_TYPES_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


def row_bytes(type_name: str, n_elements: int) -> int:
    """Return the bytes of `n_elements` neighbouring elements, whole blocks of the type.

    Raises:
        ValueError: they do not fill whole blocks.
        KeyError: there is no such type.
    """
    kind = _TYPES_BY_NAME[type_name]
    if n_elements % kind.block_size:
        raise ValueError(f"{n_elements} elements are not whole blocks of {kind.block_size}")
    return n_elements // kind.block_size * kind.block_bytes


@dataclass(frozen=True)
class GgufFile:
    """One file: its metadata and its tensors (absolute offsets, in file order)."""

    path: Path
    version: int
    metadata: GgufMetadata
    tensors: tuple[TensorRecord, ...]
    state: FileState
    alignment: int
    data_offset: int

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read and check the header of one file.

        Raises:
            GgufError: the file cannot be read or its header is malformed.
        """
        try:
            status = path.stat()
            # A FIFO or a device would block or never end; open() alone would already wait.
            if not stat.S_ISREG(status.st_mode):
                raise GgufError(f"{path} is not a regular file; pass a .gguf file")
            refuse_pointer(path)
            with path.open("rb") as file:
                return _read(Cursor(file, path, status.st_size), FileState.of(status))
        except OSError as error:
            raise GgufError(f"cannot read {path}: {error.strerror or error}") from error


def header_bytes(file: BinaryIO, path: Path, n_bytes: int) -> int:
    """Return the length of the header that a GGUF file of `n_bytes` begins with.

    Args:
        file: the header's bytes, sought and read in order.
        path: name of the file in errors.

    Raises GgufError as `GgufFile.read`.
    """
    return _read(Cursor(file, path, n_bytes), FileState(0, 0, n_bytes, 0)).data_offset


class _TensorInfo(NamedTuple):
    name: str
    kind: GgmlType
    sizes: tuple[int, ...]  # the contiguous dimension first, as in the file
    offset: int  # in the data


def _read(cursor: Cursor, state: FileState) -> GgufFile:
    version = _read_version(cursor)
    n_tensors, n_pairs = cursor.u64(), cursor.u64()
    _check_count(cursor, "key-value pairs", n_pairs, MAX_METADATA, _MIN_PAIR_BYTES)
    _check_count(cursor, "tensors", n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
    metadata = read_metadata(cursor, n_pairs)
    alignment = _read_alignment(cursor, metadata)
    infos = [_read_tensor(cursor) for _ in range(n_tensors)]
    data_offset = cursor.position
    if infos:
        data_offset = _align_up(data_offset, alignment)
    tensors = _place(cursor, infos, data_offset, alignment)
    return GgufFile(cursor.path, version, metadata, tensors, state, alignment, data_offset)


def _read_version(cursor: Cursor) -> int:
    if cursor.file_bytes < 24:
        raise cursor.refuse(f"has {cursor.file_bytes} bytes, too few for a GGUF file")
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise cursor.refuse(f"begins with {magic!r}, not with b'GGUF'", "it is no GGUF file")
    version = cursor.u32()
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise cursor.refuse("is a big-endian GGUF file", "convert the model to little endian")
    if version not in VERSIONS:
        raise cursor.refuse(f"is GGUF version {version}", "get it in version 3 (2 is read too)")
    return version


def _check_count(cursor: Cursor, what: str, count: int, limit: int, min_bytes: int) -> None:
    if count > limit:
        raise cursor.refuse(f"claims {count} {what}; at most {limit} are accepted")
    if count * min_bytes > cursor.n_left:
        raise cursor.refuse(
            f"claims {count} {what}, too many for its {cursor.file_bytes} bytes",
            "it seems to be cut; download it again",
        )


def _read_alignment(cursor: Cursor, metadata: GgufMetadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.type_name(key)
    if kind != "u32":
        raise cursor.refuse(f"has {key} of type {kind}; it must be u32")
    alignment = cast(int, metadata[key])
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        limit = format_bytes(MAX_ALIGNMENT)
        raise cursor.refuse(f"has {key} {alignment}, not a power of two of at most {limit}")
    return alignment


def _read_tensor(cursor: Cursor) -> _TensorInfo:
    name = cursor.name("tensor name", MAX_NAME_BYTES)

    def refuse(reason: str, remedy: str = DAMAGED) -> GgufError:
        return cursor.refuse(f"has the tensor {name!r} {reason}", remedy)

    rank = cursor.u32()
    if rank > MAX_RANK:
        raise refuse(f"with {rank} dimensions; at most {MAX_RANK} are accepted")
    sizes = tuple(cursor.u64() for _ in range(rank))
    if any(not 1 <= size < 2**63 for size in sizes) or prod(sizes) >= 2**63:
        raise refuse(f"of the shape {sizes}, which is empty, negative or too large")
    code = cursor.u32()
    if code not in GGML_TYPES:
        raise refuse(f"of the unknown type {code}", "convert the model with a current llama.cpp")
    kind = GGML_TYPES[code]
    if (sizes[0] if sizes else 1) % kind.block_size:
        raise refuse(
            f"with {sizes[0] if sizes else 1} elements per row, which are no whole "
            f"{kind.name} blocks of {kind.block_size}"
        )
    return _TensorInfo(name, kind, sizes, cursor.u64())


def _place(
    cursor: Cursor, infos: list[_TensorInfo], data_offset: int, alignment: int
) -> tuple[TensorRecord, ...]:
    """Return the records; refuse tensors with holes, overlaps, or outside of the file."""
    tensors: dict[str, TensorRecord] = {}
    expected = 0
    for name, kind, sizes, offset in infos:
        n_bytes = prod(sizes) // kind.block_size * kind.block_bytes
        if name in tensors:
            raise cursor.refuse(f"has the tensor {name!r} twice")
        if offset != expected:
            raise cursor.refuse(f"has the tensor {name!r} {_fault(offset, expected, alignment)}")
        if data_offset + offset + n_bytes > cursor.file_bytes:
            raise cursor.refuse(
                f"has {cursor.file_bytes} bytes, but its tensor {name!r} ends at "
                f"{data_offset + offset + n_bytes}",
                "it is incomplete, download it again",
            )
        shape = tuple(reversed(sizes))
        record = TensorRecord(name, kind.name, shape, cursor.path, data_offset + offset, n_bytes)
        tensors[name] = record
        expected = _align_up(offset + n_bytes, alignment)
    return tuple(tensors.values())


def _fault(offset: int, expected: int, alignment: int) -> str:
    if offset % alignment:
        return f"at {offset}, which is not aligned to {alignment} bytes"
    if offset < expected:
        return f"at {offset}, where it overlaps the one before it (which ends at {expected})"
    return f"at {offset}, after a hole that begins at {expected}"


def _align_up(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
