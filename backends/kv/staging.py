"""Staging: the memory that cold blocks of one layer after the other pass through, and its thread.

    file ──read──▶ buffer 0: cold blocks of layer 0 ──▶ attention ──write, if new──▶ file
                   buffer 1: cold blocks of layer 1, read meanwhile
                   buffer 0: cold blocks of layer 2 ...

A block has the same place in a buffer as in the file, so that the masks of a pass are the same for
all layers. New rows of a long prompt are written straight to the buffer, and from there to the file
when the layer is done: the prompt needs memory for two layers' KV, and its KV is not read again.

One thread reads and writes, in order: a layer is written before its buffer is filled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from backends.contract.backend import KvFileError
from backends.kv.block_file import BlockFile
from offload.ring.slots import WAKE_SECONDS, Check
from offload.storage.aligned import AlignedBuffer, buffer_bytes
from offload.storage.direct_io import StorageError

N_BUFFERS = 2
Runs = Sequence[tuple[int, int]]
"""(first, number) of consecutive blocks."""


def runs_of_blocks(blocks: Collection[int]) -> Runs:
    """Return the runs of block numbers."""
    ordered = np.array(sorted(blocks), dtype=np.int64)
    if not len(ordered):
        return ()
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs]


def wait_for(job: Future[None], check: Check) -> None:
    """Wait for a job, calling `check`; raise the job's error."""
    while not job.done():
        check()
        wait([job], WAKE_SECONDS)
    job.result()


@dataclass
class _Pass:
    """Jobs of one pass: by index of the layer, among those that keep KV."""

    reads: Runs
    writes: Runs
    loaded: dict[int, Future[None]]
    written: dict[int, Future[None]]


def staging_bytes(n_blocks: int, block_bytes: int) -> int:
    """Return the memory of the buffers for `n_blocks` blocks of at most `block_bytes`."""
    return N_BUFFERS * buffer_bytes(n_blocks * block_bytes)


class Staging:
    """Two buffers for `n_blocks` blocks of a layer, taken from the system as they are used.

    Raises:
        MemoryError: the address space cannot be had.
    """

    def __init__(self, file: BlockFile, n_blocks: int) -> None:
        self._file, self.n_layers = file, len(file.block_bytes)
        self._n_bytes = n_blocks * file.max_block_bytes
        self._buffers = [
            AlignedBuffer(self._n_bytes, is_committed=False, in_children=False)
            for _ in range(min(N_BUFFERS, self.n_layers))
        ]
        self._worker = ThreadPoolExecutor(1, "specdec-kv-file")
        self._pass = _Pass((), (), {}, {})
        self._n_touched = 0
        self.stall_seconds = 0.0
        """Seconds that passes waited for cold blocks, or for the file to take new ones."""

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the buffers take."""
        return self.bytes_of(self._n_touched)

    def bytes_of(self, n_blocks: int) -> int:
        """Return the bytes of the buffers for the first `n_blocks` blocks."""
        return len(self._buffers) * buffer_bytes(n_blocks * self._file.max_block_bytes)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Let the thread call `job` after what it has to do already."""
        return self._worker.submit(job)

    def begin(self, reads: Collection[int], writes: Collection[int], check: Check) -> None:
        """Begin a pass that reads blocks with content and writes new ones.

        Nothing of an earlier pass, which may have failed, is running afterwards.
        """
        self.abandon(check)
        self._pass = _Pass(runs_of_blocks(reads), runs_of_blocks(writes), {}, {})
        self._n_touched = max([self._n_touched, *(x + 1 for x in (*reads, *writes))])
        for layer in range(len(self._buffers)):
            self._load(layer)

    def acquire(self, layer: int, check: Check) -> torch.Tensor:
        """Wait for a layer's blocks; return them, uint8 [blocks, bytes]. Raises KvFileError."""
        began = time.perf_counter()
        try:
            for earlier in list(self._pass.written):
                if earlier <= layer - len(self._buffers):
                    self._finish(self._pass.written, earlier, check)
            if layer in self._pass.loaded:
                self._finish(self._pass.loaded, layer, check)
        finally:
            self.stall_seconds += time.perf_counter() - began
        size = self._file.block_bytes[layer]
        view = self._memory(layer)[: self._n_bytes // size * size]
        return torch.frombuffer(view, dtype=torch.uint8).view(-1, size)

    @staticmethod
    def _finish(jobs: dict[int, Future[None]], layer: int, check: Check) -> None:
        """Wait for a layer's job; until then `abandon` knows it, also if `check` raises."""
        wait_for(jobs[layer], check)
        del jobs[layer]

    def release(self, layer: int) -> None:
        """Write a layer's new blocks, and use its buffer for a later layer."""
        if self._pass.writes:
            job = self._pass
            self._pass.written[layer] = self.submit(lambda: self._write(job, layer))
        self._load(layer + len(self._buffers))

    def end(self, check: Check) -> None:
        """Wait until all new blocks are written. Raises KvFileError."""
        began = time.perf_counter()
        try:
            for job in self._pass.written.values():
                wait_for(job, check)
        finally:
            self.stall_seconds += time.perf_counter() - began

    def abandon(self, check: Check) -> None:
        """Cancel what is left of a pass and wait for the job that runs.

        If `check` raises, that job is still known, and waited for the next time.
        """
        jobs = [*self._pass.loaded.values(), *self._pass.written.values()]
        for job in jobs:
            job.cancel()
        while not all(job.done() for job in jobs):
            check()
            wait(jobs, WAKE_SECONDS)
        self._pass = _Pass((), (), {}, {})

    def release_above(self, n_blocks: int) -> None:
        """Give the memory of all but the first `n_blocks` blocks back. Between passes only."""
        if n_blocks < self._n_touched:
            start = n_blocks * self._file.max_block_bytes
            for buffer in self._buffers:
                buffer.release(start, len(buffer.view) - start)
            self._n_touched = n_blocks

    def close(self) -> None:
        """End the thread and free the memory. Idempotent."""
        self._worker.shutdown(cancel_futures=True)
        for buffer in self._buffers:
            buffer.close()

    # --- in the thread ---------------------------------------------------------------------------

    def _load(self, layer: int) -> None:
        job = self._pass
        if job.reads and layer < self.n_layers:
            job.loaded[layer] = self.submit(lambda: self._read(job, layer))

    def _read(self, job: _Pass, layer: int) -> None:
        for first, n in job.reads:
            with _naming(first, n):
                self._file.read(layer, first, n, self._at(layer, first))

    def _write(self, job: _Pass, layer: int) -> None:
        for first, n in job.writes:
            with _naming(first, n):
                self._file.write(layer, first, n, self._at(layer, first))

    def _at(self, layer: int, block: int) -> memoryview:
        return self._memory(layer)[block * self._file.block_bytes[layer] :]

    def _memory(self, layer: int) -> memoryview:
        return self._buffers[layer % len(self._buffers)].view


class _naming:
    """Turn a StorageError into a KvFileError that has the cold blocks' numbers."""

    def __init__(self, first: int, n: int) -> None:
        self._blocks = range(first, first + n)

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StorageError):
            raise KvFileError(str(error), self._blocks) from error
