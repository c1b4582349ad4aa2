"""Ranges of files that are streamed or stay, in bytes and in whole pages.

A *span* is a range of a file that one layer streams: its tensors and the small gaps between them.
The pages wholly inside a span come and go; a page at its edge that is shared with a neighbour (or
with the file's header, or its end) stays resident.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.storage.aligned import page_down, page_up
from offload.units import MIB

MAX_GAP_BYTES = MIB  # reading one along costs less than two more edges and reads

_NO_LAYER = -1


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file."""

    path: Path
    start: int
    end: int

    @property
    def whole_pages(self) -> Span:
        """All pages that the bytes touch, partly or wholly."""
        return Span(self.path, page_down(self.start), page_up(self.end))

    @property
    def inner(self) -> Span:
        """The pages wholly inside; may be empty."""
        start = page_up(self.start)
        return Span(self.path, start, max(start, page_down(self.end)))

    @property
    def edges(self) -> tuple[Span, ...]:
        """The pages in `whole_pages` but not in `inner`."""
        inner, whole_pages = self.inner, self.whole_pages
        if inner.start == inner.end:
            return (whole_pages,)
        edges = (
            Span(self.path, whole_pages.start, inner.start),
            Span(self.path, inner.end, whole_pages.end),
        )
        return tuple(edge for edge in edges if edge.start < edge.end)


def streamed_spans(
    layers: Sequence[LayerWeights], other_tensors: Iterable[TensorRecord]
) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of each layer. A gap without another owner's tensor is bridged."""
    owners = _Owners(layers, other_tensors)
    return tuple(_merge(number, layer.streamed, owners) for number, layer in enumerate(layers))


class _Owners:
    """The owner of each byte of the files: a layer's number or _NO_LAYER."""

    def __init__(
        self, layers: Sequence[LayerWeights], other_tensors: Iterable[TensorRecord]
    ) -> None:
        owner_of: dict[tuple[Path, int, int], int] = {}
        claims = [(r, number) for number, layer in enumerate(layers) for r in layer.tensors]
        for record, owner in [*claims, *((record, _NO_LAYER) for record in other_tensors)]:
            key = (record.path, record.offset, record.offset + record.n_bytes)
            # A tensor of two layers belongs to neither: it may be resident, but not streamed.
            if record.n_bytes and owner_of.setdefault(key, owner) != owner:
                owner_of[key] = _NO_LAYER
        self._sorted: dict[Path, list[tuple[int, int, int]]] = {}
        for (path, start, end), owner in sorted(owner_of.items(), key=_by_file):
            ranges = self._sorted.setdefault(path, [])
            if ranges and start < ranges[-1][1]:
                raise ValueError(f"tensors overlap at offset {start} of {path}")
            ranges.append((start, end, owner))

    def are_all(self, owner: int, path: Path, start: int, end: int) -> bool:
        """Whether all tensors that begin in [start, end) belong to `owner`."""
        ranges = self._sorted[path]
        first = bisect_left(ranges, (start,))
        last = bisect_left(ranges, (end,))
        return all(ranges[i][2] == owner for i in range(first, last))


def _by_file(item: tuple[tuple[Path, int, int], int]) -> tuple[str, int, int]:
    (path, start, end), _ = item
    return str(path), start, end


def _merge(number: int, streamed: Iterable[TensorRecord], owners: _Owners) -> tuple[Span, ...]:
    spans: list[Span] = []
    records = (record for record in streamed if record.n_bytes)
    for record in sorted(records, key=lambda r: (str(r.path), r.offset)):
        end = record.offset + record.n_bytes
        if not owners.are_all(number, record.path, record.offset, end):
            raise ValueError(f"{record.name} is streamed, but is also another layer's or resident")
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.path == record.path
            and record.offset - last.end <= MAX_GAP_BYTES
            and owners.are_all(number, record.path, last.end, record.offset)
        ):
            spans[-1] = Span(last.path, last.start, end)
        else:
            spans.append(Span(record.path, record.offset, end))
    return tuple(spans)


def resident_spans(
    layers: Sequence[LayerWeights],
    resident: Iterable[TensorRecord],
    spans: Sequence[Sequence[Span]],
) -> list[Span]:
    """Return the ranges that stay in memory, in order; spans whose pages touch are joined."""
    fixed = [edge for group in spans for span in group for edge in _needed_edges(span)]
    fixed += [_span_of(record) for record in resident if record.n_bytes]
    for group, layer in zip(spans, layers, strict=True):
        for record in layer.resident_records:
            tensor = _span_of(record)
            if record.n_bytes and not any(_contains(span, tensor) for span in group):
                fixed.append(tensor)
    joined: list[Span] = []
    for span in sorted(fixed, key=lambda s: (str(s.path), s.start)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.path == span.path
            and span.whole_pages.start <= last.whole_pages.end
        ):
            joined[-1] = Span(last.path, last.start, max(last.end, span.end))
        else:
            joined.append(span)
    return joined


def _needed_edges(span: Span) -> list[Span]:
    """Return the edges of `span`, cut to its own bytes."""
    return [
        Span(span.path, max(edge.start, span.start), min(edge.end, span.end)) for edge in span.edges
    ]


def _span_of(record: TensorRecord) -> Span:
    return Span(record.path, record.offset, record.offset + record.n_bytes)


def _contains(span: Span, other: Span) -> bool:
    return span.path == other.path and span.start <= other.start and other.end <= span.end
