"""Weights that stay in memory, read while the first forward pass is already running.

The model is read once for both loading and the first pass: resident layers are read in the order in
which the pass needs them, beside those that stream. A cursor waits for what a layer needs.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.ring.readers import ReaderThreads
from offload.ring.slots import JOIN_SECONDS, WAKE_SECONDS, Check, StreamerClosed
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.layout import ReadChunk
from offload.storage.reading import DEFAULT_N_READERS, Fetch, OpenFiles
from offload.units import Progress


class BackgroundReads:
    """Threads that read chunks to their final place, in the order in which layers need them.

    Args:
        pieces: chunks with the number of the layer that needs each first, as `by_need` finds it.
        n_layers: number of layers of the model.
        fetch: reads one chunk to its place; called in the threads.
        finish: called once, when everything is there.
        progress: called by the threads after each chunk; what it raises counts as a failed read.

    Raises StorageError if a file cannot be opened, SpecdecError if a thread does not start.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[int, ReadChunk]],
        n_layers: int,
        fetch: Fetch,
        *,
        finish: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
        n_readers: int = DEFAULT_N_READERS,
        storage: OpenStorage = DirectFile,
    ) -> None:
        self._fetch, self._finish, self._progress = fetch, finish, progress
        self._waiting = deque(sorted(pieces, key=lambda item: item[0]))
        self._n_missing = [0] * n_layers
        for layer, _ in self._waiting:
            self._n_missing[layer] += 1
        self._n_done, self._n_total = 0, sum(read_chunk.n_needed for _, read_chunk in pieces)
        self._arrived = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_over = not pieces
        self._threads = ReaderThreads("specdec-load", n_readers)
        self._files = OpenFiles((read_chunk.path for _, read_chunk in pieces), storage)
        try:
            self._start()
        except BaseException:
            self.close()
            self.join(JOIN_SECONDS)
            raise

    @property
    def is_over(self) -> bool:
        """Whether everything has been read, from files that have not changed."""
        return self._is_over

    @property
    def unread_bytes(self) -> int:
        """Bytes of all chunks that have not been read yet."""
        return self._n_total - self._n_done

    def wait(self, layer: int, check: Check | None = None) -> None:
        """Wait until everything that the layers up to this one need has been read.

        check: called regularly; what it raises ends the wait.

        Raises:
            The error of a failed read, or StorageError if a file was overwritten; the next call
                reads what is missing again.
            StreamerClosed: `close` was called.
        """
        if self._is_over:
            return
        with self._arrived:
            while any(self._n_missing[: layer + 1]):
                self._raise_error()
                self._start()
                if check is not None:
                    check()
                self._arrived.wait(WAKE_SECONDS)
            if not any(self._n_missing):
                self._files.check_unchanged()  # at the end, because by then all bytes were read
                self._finish()
                self._files.close()
                self._is_over = True

    def close(self) -> None:
        """Let the threads end after their current read; call `join` next."""
        with self._arrived:
            self._is_closed = True
            self._waiting.clear()
            self._arrived.notify_all()

    def join(self, timeout_seconds: float) -> bool:
        """After `close`: wait for the threads; return False if one still hangs in a read."""
        if not self._threads.join(timeout_seconds):
            return False
        self._files.close()
        return True

    def _start(self) -> None:
        if self._waiting and not self._threads.are_running:
            self._threads.start(partial(_read_all, self))

    def _raise_error(self) -> None:
        if self._is_closed:
            raise StreamerClosed("the weight streamer is closed; load the model again")
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- in the threads --------------------------------------------------------------------

    def next_chunk(self) -> tuple[int, ReadChunk] | None:
        """Return the next chunk to read; None if none is left, or a read failed."""
        with self._arrived:
            if self._error is not None or not self._waiting:
                return None
            return self._waiting.popleft()

    def fetch(self, layer: int, read_chunk: ReadChunk) -> None:
        """Read a chunk that `layer` needs; `wait` raises the error of a failed read."""
        try:
            self._fetch(self._files, read_chunk)
            with self._arrived:
                self._n_done += read_chunk.n_needed
                if self._progress is not None:
                    self._progress(self._n_done, self._n_total)
                self._n_missing[layer] -= 1
                self._arrived.notify_all()
        except BaseException as error:  # whatever it is, the caller must learn of it
            with self._arrived:
                self._error = self._error or error
                if not self._is_closed:
                    self._waiting.appendleft((layer, read_chunk))
                self._arrived.notify_all()


def _read_all(reads: BackgroundReads) -> None:
    while (work := reads.next_chunk()) is not None:
        reads.fetch(*work)


def by_need(
    pieces: Iterable[ReadChunk],
    layers: Sequence[LayerWeights],
    other_tensors: Iterable[TensorRecord] = (),
) -> list[tuple[int, ReadChunk]]:
    """Pair each chunk with the number of the first layer that has a tensor in it.

    other_tensors: non-layer tensors of the files; they are needed first.
    """
    owned = [(record, 0) for record in other_tensors]
    owned += [(record, i) for i, layer in enumerate(layers) for record in layer.tensors]
    tensors: dict[Path, list[tuple[int, int, int]]] = {}
    for record, layer_number in owned:
        end = record.offset + record.n_bytes
        tensors.setdefault(record.path, []).append((end, record.offset, layer_number))
    for result in tensors.values():
        result.sort()
    return [
        (_first_layer(read_chunk, tensors.get(read_chunk.path, [])), read_chunk)
        for read_chunk in pieces
    ]


def _first_layer(read_chunk: ReadChunk, tensors: Sequence[tuple[int, int, int]]) -> int:
    """tensors: (end, start, layer) of those in the chunk's file, which do not overlap."""
    start, end = read_chunk.file_offset, read_chunk.file_offset + read_chunk.n_bytes
    layers = []
    for _, tensor_start, layer in tensors[bisect_left(tensors, (start + 1,)) :]:
        if tensor_start >= end:
            break
        layers.append(layer)
    return min(layers, default=0)
