"""Threads that read experts, several reads at a time, and statistics of what they read.

Abandoned reads count like all others: the storage has delivered their bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

from offload.errors import SpecdecError
from offload.process.worker import POLL_SECONDS
from offload.ring.slots import JOIN_SECONDS
from offload.storage.direct_io import DirectFile, OpenStorage, StorageError
from offload.storage.layout import ReadChunk
from offload.storage.reading import OpenFiles
from offload.trace import READ, WAIT, record_since

logger = logging.getLogger(__name__)

N_READERS = 8
"""Reads in flight: an expert is a few MB, and storage wants several at a time."""
Failure: TypeAlias = StorageError | MemoryError | OSError | None
"""Error of a read, or None."""
Check = Callable[[], None]
"""Called regularly while reads are waited for; what it raises ends the wait."""


@dataclass
class ExpertStats:
    """Traffic since the cache was made."""

    n_asked: int = 0
    n_hits: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    n_asked_full: int = 0
    """Experts asked for by passes of one token, once all slots were in use."""
    n_hits_full: int = 0
    """Hits among `n_asked_full`."""


class ExpertReaders:
    """Reader threads of one model's files. `stop` and `close` may be called during reads.

    Raises StorageError if a file cannot be opened.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        n_readers: int | None = None,
        storage: OpenStorage = DirectFile,
    ) -> None:
        self.stats = ExpertStats()
        self._files = OpenFiles(paths, storage)
        self._pool = ThreadPoolExecutor(n_readers or N_READERS, thread_name_prefix="specdec-expert")
        self._begun: set[Future[Failure]] = set()
        """Reads that have not ended."""
        self._is_stopped = False
        self._lock = threading.Lock()

    def begin(self, read_chunk: ReadChunk, memory: Callable[[], memoryview]) -> Future[Failure]:
        """Begin to read a chunk.

        memory: returns the chunk's destination; called in the thread that reads.

        Raises:
            SpecdecError: this was stopped.
        """
        with self._lock:
            self.check_open()
            read = self._pool.submit(self._read, read_chunk, memory)
            self._begun.add(read)
        read.add_done_callback(self._begun.discard)
        return read

    def _read(self, read_chunk: ReadChunk, memory: Callable[[], memoryview]) -> Failure:
        started = perf_counter()
        try:
            n_bytes = self._files.read(read_chunk, memory())
        except (StorageError, MemoryError, OSError) as error:
            return copy(error)  # without its frames, which refer to the memory
        record_since(started, READ, "experts", n_bytes, read_chunk.path)
        with self._lock:
            self.stats.bytes_read += n_bytes
        return None

    def wait_for(self, reads: Collection[Future[Failure]], check: Check | None) -> None:
        """Wait until reads have ended. Raises what `check` does, and SpecdecError after `stop`."""
        while wait(reads, POLL_SECONDS).not_done:
            self.check_open()
            if check is not None:
                check()

    def stall_for(
        self, reads: Collection[Future[Failure]], layer: int, check: Check | None
    ) -> None:
        """Wait for reads that a pass needs now. Raises also the error of one of them."""
        started = perf_counter()
        self.wait_for(reads, check)
        seconds = record_since(started, WAIT, f"wait for experts of layer {layer}")
        self.stats.stall_seconds += seconds
        for read in reads:
            if (error := read.result()) is not None:
                raise copy(error)  # its frames lead to the read, which must not refer back to them

    def check_unchanged(self) -> None:
        """Raise StorageError if one of the files was overwritten since it was opened."""
        self._files.check_unchanged()

    def stop(self) -> None:
        """End a waiting pass with an error; no read is begun from then on."""
        with self._lock:
            self._is_stopped = True

    def check_open(self) -> None:
        if self._is_stopped:
            raise SpecdecError("the model was closed")

    def close(self) -> bool:
        """Free threads and files; return whether all reads have ended. Idempotent."""
        self.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if wait(tuple(self._begun), JOIN_SECONDS).not_done:
            # Its file and memory are in use: leaking them is the lesser evil.
            logger.warning("a read from storage does not return; its memory is not freed")
            return False
        self._files.close()
        return True
