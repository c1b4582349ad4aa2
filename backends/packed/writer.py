"""Packing: writes a packed copy of one safetensors file, a piece of a tensor at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from backends.packed.errors import PackError
from backends.packed.twelve_bits import MAX_EXCEPTIONS, Planes, TwelveBits, choose_base, header
from offload.formats.packed import METADATA_KEY, VERSION
from offload.formats.safetensors import read_header_and_metadata
from offload.formats.tensors import CheckpointError, TensorRecord

_CODEC = TwelveBits()
_ALIGNMENT = 64  # alignment of the first tensor
_MAX_TENSOR_BYTES = 10**15  # more digits than the size of any tensor has
_COPIED_AT_ONCE = 2 << 20
_SAMPLES, _SAMPLE_WEIGHTS = 16, 1 << 16
_MIN_GAIN = 0.8
"""Maximum ratio of packed to stored size: a tensor with a higher one is too small to pack."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of the copy."""

    name: str
    source_bytes: int
    n_bytes: int
    scheme: str = ""
    exceptions: float | None = None
    """Share of exceptions among the weights; None if packing was not tried."""


def min_bytes(record: TensorRecord) -> int:
    """Return the minimum packed size of a tensor."""
    return _CODEC.min_bytes(math.prod(record.shape))


def pays_to_pack(record: TensorRecord) -> bool:
    """Return whether a tensor is a bf16 matrix that is not tiny."""
    is_matrix = record.dtype == _CODEC.number_format and len(record.shape) >= 2
    return is_matrix and min_bytes(record) <= _MIN_GAIN * record.n_bytes


@dataclass(frozen=True)
class FileWriter:
    """Writer of a copy of `source` at `destination` with the tensors `requested` packed."""

    source: Path
    destination: Path
    requested: frozenset[str]
    n_threads: int
    verify: bool
    """Whether everything is read back and compared with the source."""
    advance: Advance
    """Progress callback: source bytes that were written, and again once they are compared."""

    def write(self) -> tuple[WrittenTensor, ...]:
        """Write the copy. Raises PackError if verification fails, and OSError."""
        metadata, by_name = read_header_and_metadata(self.source)
        records = sorted(by_name.values(), key=lambda r: (r.offset, r.n_bytes))
        n_header = _header_bytes(metadata, records, self.requested)
        written = []
        with (
            self.source.open("rb", buffering=0) as source,
            self.destination.open("w+b", buffering=0) as out,
            ThreadPoolExecutor(self.n_threads, thread_name_prefix="specdec-pack") as threads,
        ):
            at = n_header
            for record in records:
                tensor = _TensorWriter(self, record, source, out, at, threads).write()
                written.append(tensor)
                at += tensor.n_bytes
            out.truncate(at)  # a tensor that did not pay to pack was longer
            text = _header(metadata, records, written, n_header)
            _write_at(out.fileno(), np.frombuffer(text, np.uint8), 0)
            os.fsync(out.fileno())  # report a full disk here, not when reading
        return tuple(written)


class _TensorWriter:
    """Writer of one tensor from `source` to offset `at` in `out`."""

    def __init__(
        self,
        file: FileWriter,
        record: TensorRecord,
        source: BinaryIO,
        out: BinaryIO,
        at: int,
        threads: Executor,
    ) -> None:
        self._file, self._record, self._threads, self._at = file, record, threads, at
        self._source, self._out = source.fileno(), out.fileno()
        self._n_weights = math.prod(record.shape)
        self._planes = Planes(self._n_weights)

    def write(self) -> WrittenTensor:
        record, share = self._record, None
        if record.name in self._file.requested:
            base, share = self._choose()
            if share <= MAX_EXCEPTIONS:
                exceptions = self._pack(base)
                share = len(exceptions) / self._n_weights
                if len(exceptions) <= self._planes.max_exceptions:
                    n_bytes = self._finish(base, exceptions)
                    codec = _CODEC
                    return WrittenTensor(record.name, record.n_bytes, n_bytes, codec.name, share)
        self._copy()
        return WrittenTensor(record.name, record.n_bytes, record.n_bytes, exceptions=share)

    def _choose(self) -> tuple[int, float]:
        """Return (base, share of exceptions in a sample)."""
        step = max(1, self._n_weights // _SAMPLES)
        sample = np.concatenate(
            [
                self._weights(start, min(start + _SAMPLE_WEIGHTS, start + step, self._n_weights))
                for start in range(0, self._n_weights, step)
            ]
        )
        base = choose_base(sample)
        return base, len(_CODEC.encode(sample, base)[2]) / len(sample)

    def _pack(self, base: int) -> np.ndarray:
        """Write the planes; return the exceptions, incomplete once there are too many."""
        exceptions: list[np.ndarray] = []
        num_found = 0
        for some in self._in_threads(partial(self._pack_piece, base), self._codec_pieces()):
            exceptions.append(some)
            num_found += len(some)
            if num_found > self._planes.max_exceptions:
                break
        return np.concatenate(exceptions) if exceptions else np.zeros(0, np.uint64)

    def _pack_piece(self, base: int, start: int, end: int) -> np.ndarray:
        signs, codes, exceptions = _CODEC.encode(self._weights(start, end), base)
        _write_at(self._out, signs, self._at + self._planes.signs + start)
        _write_at(self._out, codes, self._at + self._planes.codes + start // 2)
        self._file.advance((end - start) * 2)
        return exceptions + (np.uint64(start) << np.uint64(8))

    def _finish(self, base: int, exceptions: np.ndarray) -> int:
        """Write header and exceptions, and verify; return the size of the packed tensor."""
        n_bytes = self._planes.n_bytes(len(exceptions))
        first = np.frombuffer(header(base, len(exceptions)), np.uint8)
        _write_at(self._out, first, self._at)
        _write_at(
            self._out, exceptions.astype("<u8").view(np.uint8), self._at + self._planes.exceptions
        )
        if self._file.verify:
            stored = np.memmap(
                self._file.destination, np.uint8, "r", offset=self._at, shape=(n_bytes,)
            )
            decode = _CODEC.opened(stored, self._n_weights)

            def decoded(start: int, end: int) -> np.ndarray:
                out = np.empty((end - start) * 2, np.uint8)
                decode(start, end, out)
                return out

            self._compare(decoded, self._codec_pieces(), _CODEC.itemsize)
        return n_bytes

    def _copy(self) -> None:
        pieces = list(_parts(self._record.n_bytes, _COPIED_AT_ONCE))
        for _ in self._in_threads(self._copy_piece, pieces):
            pass
        if self._file.verify:
            self._compare(self._written, pieces, 1)

    def _copy_piece(self, start: int, end: int) -> None:
        _write_at(self._out, self._bytes(start, end), self._at + start)
        self._file.advance(end - start)

    def _written(self, start: int, end: int) -> np.ndarray:
        return _read_at(self._out, self._at + start, end - start, self._file.destination)

    def _compare(
        self,
        written: Callable[[int, int], np.ndarray],
        pieces: Iterable[tuple[int, int]],
        itemsize: int,
    ) -> None:
        def compare(start: int, end: int) -> None:
            if not np.array_equal(
                written(start, end), self._bytes(start * itemsize, end * itemsize)
            ):
                raise PackError(
                    f"{self._record.name} does not come back as it was from "
                    f"{self._file.destination}: the storage is broken, or this is a bug"
                )
            self._file.advance((end - start) * itemsize)

        for _ in self._in_threads(compare, pieces):
            pass

    def _codec_pieces(self) -> Iterator[tuple[int, int]]:
        return _parts(self._n_weights, _CODEC.piece_weights)

    def _weights(self, start: int, end: int) -> np.ndarray:
        return self._bytes(2 * start, 2 * end).view("<u2")

    def _bytes(self, start: int, end: int) -> np.ndarray:
        return _read_at(self._source, self._record.offset + start, end - start, self._file.source)

    def _in_threads(
        self, work: Callable[[int, int], Any], pieces: Iterable[tuple[int, int]]
    ) -> Iterator[Any]:
        """Yield results in order, a few pieces at a time, so that the caller may stop early."""
        remaining = iter(pieces)
        while some := list(islice(remaining, 4 * self._file.n_threads)):
            futures = [self._threads.submit(work, start, end) for start, end in some]
            # None of them may still write when the caller stops and writes to the same bytes.
            yield from [future.result() for future in futures]


def _parts(n: int, limit: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, limit):
        yield start, min(start + limit, n)


def _header_bytes(
    metadata: Mapping[str, str], records: Iterable[TensorRecord], requested: frozenset[str]
) -> int:
    """Return the maximum size of a header, whichever of the `requested` tensors are packed."""
    written = [
        WrittenTensor(
            r.name, r.n_bytes, _MAX_TENSOR_BYTES, _CODEC.name if r.name in requested else ""
        )
        for r in records
    ]
    n_bytes = 8 + len(_header_text(metadata, records, written))
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _header(
    metadata: Mapping[str, str],
    records: Iterable[TensorRecord],
    written: Iterable[WrittenTensor],
    n_bytes: int,
) -> bytes:
    text = _header_text(metadata, records, written)
    return (n_bytes - 8).to_bytes(8, "little") + text.ljust(n_bytes - 8)


def _header_text(
    metadata: Mapping[str, str], records: Iterable[TensorRecord], written: Iterable[WrittenTensor]
) -> bytes:
    entries, packed, at = {}, {}, 0
    for record, tensor in zip(records, written, strict=True):
        dtype, shape = record.dtype, list(record.shape)
        if tensor.scheme:
            packed[record.name] = {"scheme": tensor.scheme, "dtype": dtype, "shape": shape}
            dtype, shape = "U8", [tensor.n_bytes]
        offsets = [at, at + tensor.n_bytes]
        entries[record.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += tensor.n_bytes
    listed = json.dumps({"version": VERSION, "tensors": packed}, separators=(",", ":"))
    strings = {**metadata, METADATA_KEY: listed}
    return json.dumps({"__metadata__": strings, **entries}, separators=(",", ":")).encode()


def _read_at(descriptor: int, offset: int, n_bytes: int, path: Path) -> np.ndarray:
    data = np.empty(n_bytes, np.uint8)
    view, at = data.data, 0
    while at < n_bytes:
        n_read = os.preadv(descriptor, [view[at:]], offset + at)
        if not n_read:
            raise CheckpointError(f"{path} ended while it was read; download it again")
        at += n_read
    return data


def _write_at(descriptor: int, data: np.ndarray, offset: int) -> None:
    view, at = data.data, 0
    while at < len(view):
        at += os.pwrite(descriptor, view[at:], offset + at)
