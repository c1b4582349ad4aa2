"""Matrix rows of a sparsely read tensor (embeddings), read in place before each forward pass.

The mapping itself would page them in, but end the process (SIGBUS) if the file was truncated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from offload.formats.tensors import FileState, TensorRecord
from offload.paging.address_space import give_back, prepare, reserve, view
from offload.paging.plan import ResidentRange
from offload.storage.aligned import page_down, page_up
from offload.storage.direct_io import StorageError


class RowsInPlace:
    """Replaces a tensor's mapping with memory; rows that no pass has asked for take none.

    Args:
        address: address at which the tensor is mapped.
        beside: pages that are in memory already; the tensor may begin or end in one of them.

    Rows are read through the page cache, which keeps those that are used often. Raises StorageError
    if the file cannot be opened.
    """

    def __init__(self, record: TensorRecord, address: int, beside: Sequence[ResidentRange]) -> None:
        self._record, self._address = record, address
        self._row_bytes = record.n_bytes // record.shape[0]
        self._start, self._end = page_down(address), page_up(address + record.n_bytes)
        for pages in beside:
            end = pages.address + pages.n_bytes
            if pages.address <= self._start < end:
                self._start = end
            elif pages.address < self._end <= end:
                self._end = pages.address
        try:
            self._file = record.path.open("rb", buffering=0)
        except OSError as error:
            raise StorageError(f"cannot open {record.path}: {error.strerror or error}") from error
        self._state = FileState.of(os.fstat(self._file.fileno()))
        if self._start < self._end:
            reserve(self._end - self._start, self._start)
            prepare(self._start, self._end - self._start, huge=False)

    def read(self, rows: Iterable[int]) -> None:
        """Read these rows, and free those read before.

        Raises StorageError if the file lacks some of them, or was changed.
        """
        if self._start < self._end:
            give_back(self._start, self._end - self._start)
        for row in sorted(set(rows)):
            place = self._address + row * self._row_bytes
            start, end = max(place, self._start), min(place + self._row_bytes, self._end)
            if start < end:
                self._read(start, end)
        if FileState.of(os.fstat(self._file.fileno())) != self._state:
            raise StorageError(
                f"{self._record.path} was changed while in use; load the model again"
            )

    def close(self) -> None:
        self._file.close()

    def _read(self, start: int, end: int) -> None:
        offset = self._record.offset + start - self._address
        while start < end:
            try:
                n_read = os.preadv(self._file.fileno(), [view(start, end - start)], offset)
            except OSError as error:
                raise StorageError(
                    f"{self._record.path}: {error.strerror or error} at offset {offset}"
                ) from error
            if not n_read:
                raise StorageError(
                    f"{self._record.path} was changed while in use: it ends at offset {offset}; "
                    "load the model again"
                )
            start, offset = start + n_read, offset + n_read
