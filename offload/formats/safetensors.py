"""The header of one safetensors file, an untrusted input.

File format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a
JSON object `name -> {dtype, shape, data_offsets: [begin, end]}` with offsets relative to the end of
the header, then the data. A checkpoint is untrusted input: every number of a header is checked
before it is used, and a file that is wrong in any way is refused with one clear error.
"""

from __future__ import annotations

import json
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from offload.formats.lfs import refuse_pointer
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.units import MIB, format_bytes

MAX_HEADER_BYTES = 16 * MIB  # a shard of 10,000 tensors needs about 1 MiB
MAX_TENSORS = 2**16  # of one file
MAX_JSON_VALUES = 2**20  # 16 per tensor; Python takes about 100 bytes and 1 us for one
MAX_RANK = 32

# Bits per element; F4 and F6 are packed, so their tensors must fill whole bytes.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header_and_metadata(path: Path) -> tuple[dict[str, str], dict[str, TensorRecord]]:
    """Read and check the header of one safetensors file.

    Metadata values that are not strings are left out.

    Raises:
        CheckpointError: the file cannot be read or its header is malformed.
    """
    try:
        status = path.stat()
        # A FIFO or a device would block or never end; open() alone would already wait on a FIFO.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        refuse_pointer(path)
        with path.open("rb") as file:
            header, data_start = _read_header_bytes(file, path, status.st_size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    table = parse_json_object(header, path)
    metadata = table.pop("__metadata__", None)
    if len(table) > MAX_TENSORS:
        raise CheckpointError(
            f"{path} holds {len(table)} tensors; at most {MAX_TENSORS} are accepted in one file: "
            "split it"
        )
    items = metadata.items() if isinstance(metadata, dict) else ()
    records = [_make_record(path, name, entry, data_start) for name, entry in table.items()]
    _check_coverage(path, records, data_start, status.st_size)
    strings = {name: value for name, value in items if isinstance(value, str)}
    return strings, {record.name: record for record in records}


def _read_header_bytes(file: BinaryIO, path: Path, file_bytes: int) -> tuple[bytes, int]:
    """Return the JSON bytes and the absolute offset of the data."""
    prefix = _read_exactly(file, 8)
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, too few for a safetensors file; download it again"
        )
    (n_bytes,) = struct.unpack("<Q", prefix)
    if n_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} claims a header of {n_bytes} bytes; at most "
            f"{format_bytes(MAX_HEADER_BYTES)} is accepted; download it again"
        )
    if n_bytes > file_bytes - 8:
        raise CheckpointError(
            f"{path} claims a header of {n_bytes} bytes but has only {file_bytes} bytes; "
            "download it again"
        )
    header = _read_exactly(file, n_bytes)
    if len(header) < n_bytes:
        raise CheckpointError(f"{path} ended inside its header; download it again")
    return header, 8 + n_bytes


def _read_exactly(file: BinaryIO, n_bytes: int) -> bytes:
    """Read `n_bytes`, fewer only at the end of the file (a raw read may return fewer at once)."""
    chunks = []
    while n_bytes > 0 and (chunk := file.read(n_bytes)):
        chunks.append(chunk)
        n_bytes -= len(chunk)
    return b"".join(chunks)


def parse_json_object(text: bytes, path: Path) -> dict[str, Any]:
    """Parse `text` as one JSON object; no name in it may occur twice.

    Raises CheckpointError, before it takes more memory than a few times the text's and 100 MB.
    """
    # Each value but the first follows one of these; marks inside of strings are counted, too.
    n_values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if n_values > MAX_JSON_VALUES:
        raise CheckpointError(
            f"{path} holds JSON of {n_values} values; at most {MAX_JSON_VALUES} are accepted; "
            "download it again"
        )

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise CheckpointError(f"{path} names {name[:200]!r} twice; download it again")
            table[name] = value
        return table

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds invalid JSON; download it again") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds JSON that is not an object; download it again")
    return table


def _make_record(path: Path, name: str, entry: Any, data_start: int) -> TensorRecord:
    def refuse(reason: str, remedy: str = "download it again") -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name[:200]!r} {reason}; {remedy}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"has the unknown dtype {str(dtype)[:40]!r}", "convert it to BF16 or F32")
    if not is_list_of_naturals(shape) or len(shape) > MAX_RANK:
        raise refuse("has a shape that is not a short list of non-negative integers")
    if not is_list_of_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("has data_offsets that are not two ascending non-negative integers")
    n_bytes = offsets[1] - offsets[0]
    if _n_bits(shape, DTYPE_BITS[dtype]) != 8 * n_bytes:
        raise refuse(f"of {dtype}{shape} does not fill its {n_bytes} bytes exactly")
    return TensorRecord(name, dtype, tuple(shape), path, data_start + offsets[0], n_bytes)


def is_list_of_naturals(value: Any) -> bool:
    # `type() is int` because True is an int, too; 2^63 bounds the cost of the later product.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _n_bits(shape: list[int], bits: int) -> int:
    for size in shape:
        bits *= size
    return bits


def _check_coverage(
    path: Path, records: list[TensorRecord], data_start: int, file_bytes: int
) -> None:
    """Check that tensors follow each other without gap or overlap and end at the file's end."""
    position = data_start
    for record in sorted(records, key=lambda record: (record.offset, record.n_bytes)):
        if record.offset != position:
            fault = "overlaps another one" if record.offset < position else "follows a hole"
            raise CheckpointError(
                f"{path}: tensor {record.name[:200]!r} {fault}; download it again"
            )
        position += record.n_bytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes but its header describes {position}; download it again"
        )
