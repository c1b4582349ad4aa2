"""The pages of a mixture's expert tensors, and which experts use each.

A tensor holds the same matrix of all experts, one after the other. A page shared by neighbours is
needed as long as one of them is. Pages at a tensor's edges, which other tensors may share, are not
included: see `outside`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from offload.formats.tensors import TensorRecord
from offload.paging.spans import Span
from offload.placement.experts import LayerExperts
from offload.storage.aligned import PAGE_BYTES

_KERNELS_BYTES = 8
"""Bytes per page of the kernel's page tables, which stay when pages are freed."""
_COUNT = np.uint16
"""Type of the number of experts that share a page, at most the bytes of a page."""
Pages = tuple[int, int]
"""(first, last + 1)"""


@dataclass(frozen=True)
class NonLayerRecords:
    """A mixture's expert tensors as the pager of all other weights sees them."""

    resident: tuple[TensorRecord, ...]
    """The tensors' first and last bytes, on pages that they share with others."""
    untouched: tuple[TensorRecord, ...]
    """The whole pages that hold experts only."""


def outside(layers: Iterable[LayerExperts | None]) -> NonLayerRecords:
    """Return every expert tensor, cut where its own pages begin and end."""
    resident: list[TensorRecord] = []
    untouched: list[TensorRecord] = []
    for layer in layers:
        for span, record in tensors_of(layer):
            inner = span.inner
            middle = inner if inner.start < inner.end else Span(span.path, span.end, span.end)
            for name, start, end in (
                ("first", span.start, middle.start),
                ("own", middle.start, middle.end),
                ("last", middle.end, span.end),
            ):
                part = replace(
                    record, name=f"{record.name} {name}", offset=start, n_bytes=end - start
                )
                (untouched if name == "own" else resident).append(part)
    resident, untouched = ([r for r in result if r.n_bytes] for result in (resident, untouched))
    return NonLayerRecords(tuple(resident), tuple(untouched))


def overhead_bytes(layers: Iterable[LayerExperts | None]) -> int:
    """Return the memory beside the experts: the resident edges of their tensors, the page at either
    end of the pages between, and per page between them the page table and our own two entries."""
    spans = [span for layer in layers for span, _ in tensors_of(layer)]
    n_pages = sum(max(0, span.inner.end - span.inner.start) // PAGE_BYTES for span in spans)
    return 4 * PAGE_BYTES * len(spans) + (_KERNELS_BYTES + _COUNT().itemsize + 1) * n_pages


def tensors_of(layer: LayerExperts | None) -> Iterator[tuple[Span, TensorRecord]]:
    """Yield (all experts' bytes, the first expert's record) of each tensor of a layer."""
    if layer is None:
        return
    for first, last in zip(layer.tensors[0], layer.tensors[-1], strict=True):
        yield Span(first.path, first.offset, last.offset + last.n_bytes), first


@dataclass
class Region:
    """The whole pages of one tensor, and how many of the experts in memory use each."""

    span: Span  # of the tensor
    slice_bytes: int
    address: int
    """Address of the first page of `span.inner`."""
    n_users: np.ndarray = field(init=False)
    is_border: np.ndarray = field(init=False)
    """Whether a mapping may begin or end at a page; one entry more than there are pages."""

    def __post_init__(self) -> None:
        self.n_users = np.zeros(self.n_bytes // PAGE_BYTES, dtype=_COUNT)
        self.is_border = np.zeros(len(self.n_users) + 1, dtype=np.bool_)

    @property
    def n_bytes(self) -> int:
        return self.span.inner.end - self.span.inner.start

    def pages_of(self, expert: int) -> Pages:
        start = self.span.start + expert * self.slice_bytes - self.span.inner.start
        first = max(0, start // PAGE_BYTES)
        behind = -(-(start + self.slice_bytes) // PAGE_BYTES)
        return first, max(first, min(len(self.n_users), behind))

    def at(self, run: Pages) -> int:
        """Return the address of the first page of `run`."""
        return self.address + run[0] * PAGE_BYTES

    def use(self, expert: int) -> list[Pages]:
        """Count one more expert; return the pages that are needed from now on and not in memory."""
        first, behind = self.pages_of(expert)
        self.n_users[first:behind] += 1
        return _runs(self.n_users[first:behind] == 1, first)

    def leave(self, expert: int) -> list[Pages]:
        """Count one expert less; return the pages that are not needed any more."""
        first, behind = self.pages_of(expert)
        self.n_users[first:behind] -= 1
        return _runs(self.n_users[first:behind] == 0, first)

    def note_mapping(self, run: Pages) -> None:
        """Note that these pages were mapped together and are one mapping."""
        self.is_border[run[0] : run[1]] = False
        self.is_border[[run[0], run[1]]] = True

    def pieces(self, run: Pages) -> list[Fetched]:
        """Split pages in memory into runs of one mapping each."""
        inside = run[0] + 1 + np.flatnonzero(self.is_border[run[0] + 1 : run[1]])
        borders = [run[0], *map(int, inside), run[1]]
        return [(self, read_chunk) for read_chunk in pairwise(borders)]


def _runs(is_in: np.ndarray, first: int) -> list[Pages]:
    """Return the ranges of True, counted from `first` on."""
    borders = np.flatnonzero(np.diff(np.concatenate(([0], is_in.astype(np.int8), [0]))))
    return [(first + int(a), first + int(b)) for a, b in borders.reshape(-1, 2)]


Fetched = tuple[Region, Pages]


def n_bytes_of(run: Pages) -> int:
    return (run[1] - run[0]) * PAGE_BYTES


def joined(fetched: Iterable[Fetched]) -> Iterator[Fetched]:
    """Join adjacent runs; those of each region must come in order."""
    by_region: dict[int, tuple[Region, list[Pages]]] = {}
    for region, run in fetched:
        by_region.setdefault(id(region), (region, []))[1].append(run)
    for region, runs in by_region.values():
        start, end = runs[0]
        for run in runs[1:]:
            if run[0] != end:
                yield region, (start, end)
                start = run[0]
            end = run[1]
        yield region, (start, end)


def split(run: Pages, n_bytes: int) -> Iterator[Pages]:
    step = n_bytes // PAGE_BYTES
    for start in range(run[0], run[1], step):
        yield start, min(start + step, run[1])
