"""Which aligned ranges of which files hold some tensors, and their offsets in a buffer.

Tensors of one layer are usually neighbours in a file, so that a few long reads fetch them all. An
extent is one aligned range of a file that is read as a whole; extents follow each other in the
buffer. Ranges start at multiples of ALIGNMENT in the file and in the buffer, so that a tensor keeps
its file offset modulo ALIGNMENT as its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.formats.tensors import TensorRecord
from offload.storage.aligned import ALIGNMENT, align_down, align_up
from offload.units import KIB

# Reading a gap of 64 KiB costs 30 us at 2 GB/s, less than another request does.
MERGE_GAP_BYTES = 64 * KIB


@dataclass(frozen=True)
class ReadChunk:
    """One read: `n_bytes` from `file_offset` of `path` to `buffer_offset`; all three aligned.

    Only the first `n_needed` bytes belong to tensors (or gaps between them): the others are
    rounding, and may lie past the end of the file.
    """

    path: Path
    file_offset: int
    buffer_offset: int
    n_bytes: int
    n_needed: int


@dataclass(frozen=True)
class Layout:
    """Offsets of tensors in a buffer of `n_bytes`, and the extents that fill it."""

    extents: tuple[ReadChunk, ...]
    tensors: dict[str, tuple[int, int]]  # name -> (offset in the buffer, bytes)
    n_bytes: int

    def pieces(self, read_bytes: int) -> tuple[ReadChunk, ...]:
        """Split the extents into reads of at most `read_bytes` (a multiple of ALIGNMENT)."""
        if read_bytes <= 0 or read_bytes % ALIGNMENT:
            raise ValueError(f"read_bytes must be a multiple of {ALIGNMENT}, not {read_bytes}")
        return tuple(
            read_chunk for extent in self.extents for read_chunk in _split(extent, read_bytes)
        )

    def views(self, buffer: memoryview) -> dict[str, memoryview]:
        """Return the tensors' bytes in `buffer`, which was filled according to this layout."""
        return {
            name: buffer[offset : offset + n_bytes]
            for name, (offset, n_bytes) in self.tensors.items()
        }


def make_layout(records: Iterable[TensorRecord], *, merge_gap: int = MERGE_GAP_BYTES) -> Layout:
    """Coalesce `records` into extents; gaps of up to `merge_gap` bytes are read along.

    Streamed layers merge over gaps to save requests; resident tensors use 0 to save memory (then
    only ranges that share an aligned block are merged).
    """
    extents: list[ReadChunk] = []
    tensors: dict[str, tuple[int, int]] = {}
    path, start, buffer_start, end = None, 0, 0, 0  # of the extent that grows

    def buffer_end() -> int:
        return buffer_start + align_up(end - start)

    def finish() -> None:
        if path is not None:
            n_needed = end - start
            extents.append(ReadChunk(path, start, buffer_start, align_up(n_needed), n_needed))

    for record in sorted(records, key=lambda record: (str(record.path), record.offset)):
        if record.n_bytes == 0:
            tensors[record.name] = (0, 0)
            continue
        first = align_down(record.offset)
        if record.path != path or first > start + align_up(end - start) + merge_gap:
            finish()
            path, start, buffer_start, end = record.path, first, buffer_end(), first
        end = max(end, record.offset + record.n_bytes)
        tensors[record.name] = (buffer_start + record.offset - start, record.n_bytes)
    finish()
    return Layout(tuple(extents), tensors, buffer_end())


def _split(extent: ReadChunk, read_bytes: int) -> Iterator[ReadChunk]:
    for start in range(0, extent.n_bytes, read_bytes):
        n_bytes = min(read_bytes, extent.n_bytes - start)
        yield ReadChunk(
            extent.path,
            extent.file_offset + start,
            extent.buffer_offset + start,
            n_bytes,
            min(n_bytes, extent.n_needed - start),
        )
