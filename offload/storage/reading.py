"""Reads of file ranges into buffers: the open files, and tensors that are read once and stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from offload.formats.tensors import TensorRecord
from offload.storage.aligned import AlignedBuffer, HostMemory, align_up, buffer_bytes
from offload.storage.direct_io import DirectFile, OpenStorage, StorageError
from offload.storage.layout import Layout, ReadChunk, make_layout
from offload.units import MIB, Progress

# Reads of 8 MiB already reach the full bandwidth of an NVMe-class drive. Four times the size means
# a quarter as many times that a reader must get the interpreter lock back: beside a drafting thread
# that lifted 1.3 to 2.1 GB/s.
DEFAULT_READ_BYTES = 32 * MIB
DEFAULT_N_READERS = 4
_MIN_READ_BYTES = MIB  # below, requests cost more than sharing them among the readers gains


def shared_read_bytes(n_bytes: int, n_readers: int, max_bytes: int) -> int:
    """Return the read size that splits a layer of `n_bytes` among all readers, within limits."""
    return min(max_bytes, max(_MIN_READ_BYTES, align_up(-(-n_bytes // n_readers))))


class OpenFiles:
    """Files, each opened once and shared by threads."""

    def __init__(self, paths: Iterable[Path], open_storage: OpenStorage = DirectFile) -> None:
        self._files = {}
        try:
            for path in dict.fromkeys(paths):
                self._files[path] = open_storage(path)
        except BaseException:
            self.close()
            raise

    def read(self, read_chunk: ReadChunk, buffer: memoryview) -> int:
        """Read one chunk into its place in `buffer`; return the bytes read.

        Raises:
            StorageError: fewer than the needed bytes could be read.
        """
        view = buffer[read_chunk.buffer_offset : read_chunk.buffer_offset + read_chunk.n_bytes]
        n_read = self._files[read_chunk.path].read_into(view, read_chunk.file_offset)
        if n_read < read_chunk.n_needed:  # the file was truncated between indexing and opening
            raise StorageError(
                f"{read_chunk.path}: the file ended early at offset {read_chunk.file_offset} "
                f"(wanted {read_chunk.n_needed} bytes, got {n_read}); download it again"
            )
        return n_read

    def check_unchanged(self) -> None:
        """Raise StorageError if one of the files was overwritten since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class ResidentWeights(Mapping[str, memoryview]):
    """Tensors that stay in memory: name -> raw bytes, valid until `close`.

    Args:
        allocate: makes the memory from its size in bytes; None: an AlignedBuffer that the first
            read of a page commits.
    """

    def __init__(self, layout: Layout, allocate: Callable[[int], HostMemory] | None = None) -> None:
        make = allocate or _uncommitted
        self._buffer = make(layout.n_bytes) if layout.n_bytes else None
        self.n_bytes = buffer_bytes(layout.n_bytes)  # memory taken, rounding included
        self.memory = self._buffer.view if self._buffer else memoryview(bytearray())
        self._tensors = layout.views(self.memory)

    def fetch(self, files: OpenFiles, read_chunk: ReadChunk) -> None:
        """Read one chunk of the layout to its place. Raises StorageError."""
        files.read(read_chunk, self.memory)

    def __getitem__(self, name: str) -> memoryview:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Free the memory, or leave it to the last tensor that was made from it."""
        self._tensors.clear()
        if self._buffer is not None:
            self._buffer.close()


def _uncommitted(n_bytes: int) -> HostMemory:
    return AlignedBuffer(n_bytes, is_committed=False)


def resident_footprint(records: Iterable[TensorRecord]) -> int:
    """Return the memory in bytes that `load_resident(records)` will take."""
    return buffer_bytes(make_layout(records, merge_gap=0).n_bytes)


def load_resident(
    records: Iterable[TensorRecord],
    progress: Progress | None = None,
    *,
    read_bytes: int = DEFAULT_READ_BYTES,
    n_readers: int = DEFAULT_N_READERS,
    storage: OpenStorage = DirectFile,
    allocate: Callable[[int], HostMemory] | None = None,
) -> ResidentWeights:
    """Read tensors into memory for good (embeddings, norms, head, resident layers).

    Args:
        progress: called after each read.
        allocate: makes the memory from its size in bytes; None: an AlignedBuffer.

    Raises:
        StorageError: the first read that failed (the others are given up), or a file was
            overwritten meanwhile.
        MemoryError: the memory cannot be had.
    """
    layout = make_layout(records, merge_gap=0)
    pieces = layout.pieces(read_bytes)
    weights = ResidentWeights(layout, allocate)
    try:
        read_pieces(pieces, weights.memory, progress, n_readers=n_readers, storage=storage)
    except BaseException:
        weights.close()
        raise
    return weights


def read_pieces(
    pieces: Sequence[ReadChunk],
    memory: memoryview,
    progress: Progress | None = None,
    *,
    n_readers: int = DEFAULT_N_READERS,
    storage: OpenStorage = DirectFile,
) -> None:
    """Read `pieces` into `memory`; no read is running when this returns or raises.

    Raises:
        StorageError: the first read that failed; the others are given up.
        Any exception of `progress`.
    """
    fetch_chunks(
        pieces,
        lambda files, read_chunk: files.read(read_chunk, memory),
        progress,
        n_readers=n_readers,
        storage=storage,
    )


Fetch = Callable[[OpenFiles, ReadChunk], object]
"""Reads one chunk to its place."""


def fetch_chunks(
    pieces: Sequence[ReadChunk],
    fetch: Fetch,
    progress: Progress | None = None,
    *,
    n_readers: int = DEFAULT_N_READERS,
    storage: OpenStorage = DirectFile,
) -> None:
    """Call `fetch` for each chunk, in `n_readers` threads; none is running at the end.

    Raises:
        The first exception of a `fetch`; the others are given up.
        StorageError: a file was overwritten meanwhile.
        Any exception of `progress`.
    """
    finished: SimpleQueue[Future[int]] = SimpleQueue()
    n_done, n_total = 0, sum(read_chunk.n_needed for read_chunk in pieces)

    def fetch_one(read_chunk: ReadChunk) -> int:
        fetch(files, read_chunk)
        return read_chunk.n_needed

    files = OpenFiles((read_chunk.path for read_chunk in pieces), storage)
    pool = ThreadPoolExecutor(n_readers, thread_name_prefix="specdec-load")
    try:
        for read_chunk in pieces:
            pool.submit(fetch_one, read_chunk).add_done_callback(finished.put)
        for _ in pieces:
            n_done += finished.get().result()
            if progress is not None:
                progress(n_done, n_total)
        files.check_unchanged()  # at the end, because by then all bytes were read
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the running reads: they use the memory
        files.close()
