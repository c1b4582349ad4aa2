"""CheckedTensors: tensors of a file that `write_mapped` has written, read ahead of their use.

Reads bypass the page cache, and every piece is compared with its checksum while the next ones are
read, so that what a consumer gets is what was written, at nearly the storage's speed. No byte is
used that was not compared: a file that is changed or truncated meanwhile is a damaged one.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload.formats.mapped import TensorShape, checksums, pieces_of
from offload.formats.safetensors import read_header_and_metadata
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.storage.aligned import AlignedBuffer, align_down, align_up
from offload.storage.direct_io import DirectFile, StorageError

_NUM_THREADS = 4
"""While one piece is read, others are compared: CRC-32 takes about as long as a fast read."""


class _Staged(NamedTuple):
    """A tensor that is being read: its bytes, and the reads of its pieces."""

    content: memoryview
    reads: list[Future[None]]


class CheckedTensors(Mapping[str, tuple[TensorShape, memoryview]]):
    """(shape, bytes) of each tensor, read at every access. Quickest in the order of the file.

    Accessing a tensor raises CheckpointError if it is damaged or cannot be read. A consumer may
    change its bytes. Close it when no tensor is accessed any more; bytes that are in use stay.

    Attributes:
        metadata: the file's metadata.
        records: its tensors in the order of the file.
        num_ahead: tensors that are read ahead of the one that was accessed last.

    Raises:
        CheckpointError: the file was not written by `write_mapped`, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.metadata, records = read_header_and_metadata(path)
        self.records = dict(sorted(records.items(), key=lambda item: item[1].offset))
        self._checksums = checksums(path, self.metadata, self.records.values())
        self._numbers = {name: i for i, name in enumerate(self.records)}
        self.num_ahead = 0
        try:
            self._file = DirectFile(path, warns=False)
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "specdec-checked-read")
        self._staged: dict[str, _Staged] = {}
        self._free: list[AlignedBuffer] = []

    def staged_bytes(self, num_ahead: int) -> int:
        """Return the maximum memory of two tensors in use and `num_ahead` that are read ahead."""
        sizes = [_buffer_bytes(record) for record in self.records.values()]
        return max((sum(sizes[i : i + 2 + num_ahead]) for i in range(len(sizes))), default=0)

    def __getitem__(self, name: str) -> tuple[TensorShape, memoryview]:
        record = self.records[name]
        number = self._numbers[name]
        coming = list(self.records)[number : number + 1 + self.num_ahead]
        for other in self._staged.keys() - set(coming):
            self._drop(other)
        for other in coming:
            if other not in self._staged:
                self._staged[other] = self._begin(self.records[other])
        content, reads = self._staged.pop(name)
        wait(reads)
        for read in reads:
            read.result()
        return TensorShape(name, record.dtype, record.shape), content

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def close(self) -> None:
        """Close the file. Idempotent."""
        for name in list(self._staged):
            self._drop(name)
        self._threads.shutdown()
        self._file.close()

    def _begin(self, record: TensorRecord) -> _Staged:
        if not record.n_bytes:
            return _Staged(memoryview(bytearray()), [])
        memory = self._memory(_buffer_bytes(record))
        first = align_down(record.offset)
        start = record.offset - first
        reads = [
            self._threads.submit(self._read, record, memory, begin, end, checksum)
            for (begin, end), checksum in zip(
                pieces_of(record.offset, record.n_bytes), self._checksums[record.name], strict=True
            )
        ]
        return _Staged(memory[start : start + record.n_bytes], reads)

    def _read(
        self, record: TensorRecord, memory: memoryview, begin: int, end: int, checksum: int
    ) -> None:
        """Read bytes begin to end of the file into a tensor's memory, and compare them."""
        first = align_down(record.offset)
        # The pages at both ends of a tensor are its own copies: others begin or end there.
        start, stop = max(align_down(begin), first), align_up(end)
        try:
            self._file.read_into(memory[start - first : stop - first], start)
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        if zlib.crc32(memory[begin - first : end - first]) != checksum:
            raise CheckpointError(
                f"{self._file.path} is damaged: its content does not match its checksum"
            )

    def _memory(self, n_bytes: int) -> memoryview:
        """Return memory that is used again once nothing refers to it any more."""
        buffer = next((free for free in self._free if free.n_bytes >= n_bytes), None)
        if buffer is not None:
            self._free.remove(buffer)
        else:
            if self._free:  # too small
                self._free.pop().close()
            buffer = AlignedBuffer(n_bytes, is_committed=False)
        numbers = np.frombuffer(buffer.view, dtype=np.uint8)
        weakref.finalize(numbers, self._free.append, buffer).atexit = False
        return memoryview(numbers)  # type: ignore[arg-type]  # numpy knows Buffer from 2.2 on

    def _drop(self, name: str) -> None:
        wait(self._staged.pop(name).reads)


def _buffer_bytes(record: TensorRecord) -> int:
    return align_up(record.offset + record.n_bytes) - align_down(record.offset)
