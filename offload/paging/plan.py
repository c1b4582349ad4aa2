"""Plan which pages of a mapped file are streamed, which stay, and their places in a slot.

Pages are moved, not copied, and a huge page moves as one only between addresses that are multiples
of 2 MiB. So the inner range of a span is cut at such addresses into a head, a body of whole huge
pages, and a tail. Bodies share one part of a slot and stay on huge pages; heads and tails share
another, on small pages. No huge page is ever split, whatever the addresses. It costs at most 2 MiB
per span and slot, because either part is as large as the largest need of any layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import AddressSpaceError, MappedRange
from offload.paging.spans import Span, resident_spans, streamed_spans
from offload.placement.placement import LayerWeights
from offload.storage.aligned import HUGE_PAGE_BYTES, buffer_bytes
from offload.storage.layout import Layout, ReadChunk
from offload.storage.reading import resident_footprint

Mappings = Mapping[Path, Sequence[MappedRange]]
"""The mapped ranges of each file."""


@dataclass(frozen=True)
class Part:
    """A streamed range of one file: `n_bytes` at `address`, or in a slot."""

    address: int
    slot_offset: int
    n_bytes: int


@dataclass(frozen=True)
class PagedLayer:
    """The reads of a layer (into the slot, at `ReadChunk.buffer_offset`) and its parts to be moved;
    empty if all of it is resident."""

    reads: Layout
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ResidentRange:
    """Whole pages of a file that stay in memory at their own address."""

    path: Path
    file_offset: int
    n_bytes: int
    address: int
    n_needed: int  # up to a tensor's last byte; bytes after it may lie past the file's end


@dataclass(frozen=True)
class PagingPlan:
    """Addresses of everything that the pager touches."""

    layers: tuple[PagedLayer, ...]
    resident: tuple[ResidentRange, ...]
    body_bytes: int  # of a slot, on huge pages
    edge_bytes: int  # of a slot, on small pages

    @property
    def slot_bytes(self) -> int:
        return self.body_bytes + self.edge_bytes

    @property
    def resident_bytes(self) -> int:
        return sum(part.n_bytes for part in self.resident)


def plan_paging(
    layers: Sequence[LayerWeights],
    resident: Iterable[TensorRecord],
    mappings: Mappings,
    untouched: Iterable[TensorRecord] = (),
) -> PagingPlan:
    """Plan every page of the files.

    Args:
        resident: non-layer tensors that stay in memory.
        untouched: further tensors in the files, whose pages remain as they are mapped.

    Raises:
        ValueError: tensors overlap, or a layer streams one that is also used elsewhere.
        AddressSpaceError: a tensor's pages are not mapped, or mapped twice.
    """
    resident = tuple(resident)
    spans = streamed_spans(layers, (*resident, *untouched))
    cut = [
        [_cut(locate(span.inner, mappings), span.inner) for span in layer_spans]
        for layer_spans in _with_pages(spans)
    ]
    body_bytes = max((sum(_body_bytes(c) for c in cuts) for cuts in cut), default=0)
    edge_bytes = max((sum(_edge_bytes(c) for c in cuts) for cuts in cut), default=0)
    return PagingPlan(
        layers=tuple(_lay_out(cuts, body_bytes) for cuts in cut),
        resident=tuple(
            ResidentRange(
                span.path,
                span.whole_pages.start,
                span.whole_pages.end - span.whole_pages.start,
                locate(span.whole_pages, mappings),
                span.end - span.whole_pages.start,
            )
            for span in resident_spans(layers, resident, spans)
        ),
        body_bytes=body_bytes,
        edge_bytes=edge_bytes,
    )


def paging_overhead_bytes(
    layers: Sequence[LayerWeights], n_slots: int, other_tensors: Iterable[TensorRecord] = ()
) -> int:
    """Return an upper bound of a Pager's memory beyond what `plan_placement` counts for `layers`.

    A bound, because the addresses are not known yet: 2 MiB per span and slot, page edges, and gaps
    that are read along.

    Args:
        other_tensors: the further tensors in the files, resident or not. They do not count, but
            no gap that holds one is read along.
    """
    spans = streamed_spans(layers, other_tensors)
    n_paged = sum(1 for group in _with_pages(spans) if group)
    resident = resident_spans(layers, (), spans)
    n_bytes = min(n_slots, n_paged) * _max_slot_bytes(spans)
    n_bytes += sum(span.whole_pages.end - span.whole_pages.start for span in resident)
    records = {r.name: r for layer in layers for r in layer.resident_records}
    n_streamed = sum(1 for layer in layers if layer.layout.extents)
    slot_bytes = max((layer.slot_bytes for layer in layers), default=0)
    planned = resident_footprint(records.values())
    planned += min(n_slots, n_streamed) * buffer_bytes(slot_bytes)
    return max(0, n_bytes - planned)


def paging_slot_bytes(
    layers: Sequence[LayerWeights], other_tensors: Iterable[TensorRecord] = ()
) -> int:
    """Return the maximum memory of one slot of a Pager, and so of one pinned layer;
    `other_tensors` as for `paging_overhead_bytes`."""
    return buffer_bytes(_max_slot_bytes(streamed_spans(layers, other_tensors)))


def _max_slot_bytes(spans: Sequence[Sequence[Span]]) -> int:
    lengths = [[s.inner.end - s.inner.start for s in group] for group in _with_pages(spans)]
    body_bytes = max((sum(_huge_down(n) for n in ns) for ns in lengths), default=0)
    edge_bytes = max((sum(_max_edge_bytes(n) for n in ns) for ns in lengths), default=0)
    return body_bytes + edge_bytes


def locate(span: Span, mappings: Mappings) -> int:
    """Return the address of the span's first byte."""
    result = [
        mapped.address + span.start - mapped.file_offset
        for mapped in mappings.get(span.path, ())
        if mapped.file_offset <= span.start and span.end <= mapped.file_offset + mapped.n_bytes
    ]
    if len(result) != 1:
        raise AddressSpaceError(
            f"{span.path}: bytes {span.start} to {span.end} are mapped {len(result)} times instead "
            "of once; load the model with mmap"
        )
    return result[0]


@dataclass(frozen=True)
class _Cut:
    """Consecutive ranges of a file: (address, file offset, bytes, whether on huge pages)."""

    path: Path
    ranges: tuple[tuple[int, int, int, bool], ...]


def _cut(address: int, span: Span) -> _Cut:
    """Cut a span at `address` into head, body and tail, without empty ones."""
    end = address + span.end - span.start
    borders = [address, _huge_up(address), _huge_down(end), end]
    if borders[1] >= borders[2]:
        borders = [address, end]
    return _Cut(
        span.path,
        tuple(
            (start, span.start + start - address, stop - start, len(borders) == 4 and number == 1)
            for number, (start, stop) in enumerate(zip(borders, borders[1:], strict=False))
            if start < stop
        ),
    )


def _body_bytes(cut: _Cut) -> int:
    return sum(n_bytes for _, _, n_bytes, is_huge in cut.ranges if is_huge)


def _edge_bytes(cut: _Cut) -> int:
    return sum(n_bytes for _, _, n_bytes, is_huge in cut.ranges if not is_huge)


def _lay_out(cuts: Sequence[_Cut], body_bytes: int) -> PagedLayer:
    """Put bodies at the slot's beginning, and heads and tails after `body_bytes`."""
    reads: list[ReadChunk] = []
    parts: list[Part] = []
    ends = {True: 0, False: body_bytes}
    for cut in cuts:
        for address, file_offset, n_bytes, is_huge in cut.ranges:
            parts.append(Part(address, ends[is_huge], n_bytes))
            reads.append(ReadChunk(cut.path, file_offset, ends[is_huge], n_bytes, n_bytes))
            ends[is_huge] += n_bytes
    return PagedLayer(Layout(tuple(reads), {}, sum(read.n_bytes for read in reads)), tuple(parts))


def _max_edge_bytes(n_bytes: int) -> int:
    """Return the largest size of head and tail of a range of `n_bytes`, at any address."""
    return n_bytes - max(0, _huge_down(n_bytes) - HUGE_PAGE_BYTES)


def _huge_down(address: int) -> int:
    return address - address % HUGE_PAGE_BYTES


def _huge_up(address: int) -> int:
    return _huge_down(address + HUGE_PAGE_BYTES - 1)


def _with_pages(spans: Iterable[Iterable[Span]]) -> list[list[Span]]:
    """Return only the spans that have whole pages."""
    return [[span for span in group if span.inner.start < span.inner.end] for group in spans]
