"""Experts of a mixture at the addresses where its file is mapped: a cache of their pages.

Another library (llama.cpp) has mapped a file and computes from those addresses; it touches only the
experts that tokens were routed to. A tensor holds the same matrix of all experts, one after the
other. Pages of cached experts are in memory, all others are address space without access, so that
computing with an expert that was not fetched is a crash, never a wrong result.

    experts.fetch(layer, ids)     all of them are at their addresses until the next call
    experts.prefetch(layer, {})   all of a layer are read meanwhile: the tokens of a prompt ask for
                                  nearly all
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from offload.errors import SpecdecError
from offload.experts.cache import is_of_one_row
from offload.experts.eviction import ExpertIndex, record_access
from offload.experts.readers import Check, ExpertReaders, ExpertStats, Failure
from offload.paging.address_space import (
    Move,
    keep_from_children,
    max_mappings,
    move_pages,
    n_mappings,
    prepare,
    reserve,
    view,
)
from offload.paging.expert_pages import (
    Fetched,
    Pages,
    Region,
    joined,
    n_bytes_of,
    split,
    tensors_of,
)
from offload.paging.memory import no_capacity_is_memory_error
from offload.paging.plan import Mappings, locate
from offload.placement.experts import ExpertCachePlan
from offload.storage.aligned import PAGE_BYTES, populate
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.layout import ReadChunk
from offload.units import MIB, format_bytes

_READ_BYTES = 8 * MIB
_SHARE_OF_MAPPINGS = 0.5
"""Share of the allowed mappings above which experts get new pages, whose mappings join their
neighbours'. With moved pages 44 544 matrices, half of them cached, came to 65 500."""
_EXPERTS_OF_A_COUNT = 2048
"""Experts fetched between two counts, which take 1.1 ms per 1 000 mappings. An expert has up to
three matrices, each of up to two more mappings: 12 288 in all, of usually 65 530."""


class PagedExperts:
    """Experts of one mapped model, for one forward pass at a time.

    `close` must come before the mapping's owner unmaps the file.

    Args:
        expert_cache: the experts, and how much memory their pages may take.

    Raises:
        AddressSpaceError: a tensor is not mapped exactly once.
        StorageError: a file cannot be opened.
    """

    def __init__(
        self,
        expert_cache: ExpertCachePlan,
        mappings: Mappings,
        *,
        n_readers: int | None = None,
        storage: OpenStorage = DirectFile,
    ) -> None:
        self._capacity = expert_cache
        self._regions: Mapping[int, Sequence[Region]] = {
            i: [
                Region(span, first.n_bytes, locate(span.inner, mappings))
                for span, first in tensors_of(layer)
            ]
            for i, layer in enumerate(expert_cache.layers)
            if layer is not None
        }
        self._directory = ExpertIndex(expert_cache.n_experts)
        self._max_bytes, self._n_used_bytes = expert_cache.n_bytes, 0
        self._was_full = False
        self._is_closed = False
        self._reads: list[Future[Failure]] = []
        self._prefetched: tuple[int, frozenset[int]] | None = None
        """Layer of a prefetch that no access has waited for, and its missing experts."""
        self._left: list[tuple[int, int]] = []
        """(layer, expert) of an access that was given up while it read them."""
        self._unneeded: list[Fetched] = []
        """Pages to be freed; where the system refuses it, before the next access."""
        self._n_uncounted, self._may_move = _EXPERTS_OF_A_COUNT, True
        self._readers = ExpertReaders(self._paths(), n_readers, storage)
        try:
            for region in self._all():
                reserve(region.n_bytes, region.address)
        except BaseException:
            self._readers.close()
            raise

    @property
    def stats(self) -> ExpertStats:
        return self._readers.stats

    @property
    def unread_bytes(self) -> int:
        """Memory that the experts may still take."""
        return max(0, self._max_bytes - self._n_used_bytes)

    @no_capacity_is_memory_error()
    def fetch(self, layer: int, experts: Collection[int], check: Check | None = None) -> None:
        """Fetch these experts of a layer to their addresses, where they stay until the next call.

        Raises:
            StorageError: a read failed, or a file was changed.
            MemoryError: memory for them cannot be had.
            SpecdecError: this was closed, or the experts exceed its memory.
        """
        prefetched_layer, prefetched = self._end_earlier(check) or (None, frozenset())
        self._count_mappings()
        if layer != prefetched_layer:
            self._directory.access(layer)
            prefetched = frozenset()
        record_access(layer, experts)
        missing = [e for e in sorted(experts) if self._directory.find(layer, e) is None]
        n_missed = len(missing) + len(prefetched.intersection(experts))
        self._count(layer, len(experts), n_missed)
        self._n_uncounted += n_missed
        if not missing:
            return
        with self._admission(layer) as admitted:
            self._begin(self._admit(layer, missing, {layer: experts}, admitted))
            self._readers.stall_for(self._reads, layer, check)
            self._readers.check_unchanged()

    @no_capacity_is_memory_error()
    def prefetch(
        self, layer: int, in_use: Mapping[int, Collection[int]], check: Check | None = None
    ) -> None:
        """Begin to fetch all experts of a layer that fit beside those in use, in the order of the
        file. The next `fetch` waits for them.

        in_use: experts that stay, by layer: those that products are computed with.

        Raises as `fetch` does; errors of its reads are raised by the next call.
        """
        self._end_earlier(check)
        own = self._capacity.layers[layer]
        assert own is not None, "a layer without experts has nothing to fetch"
        n_free = self._capacity.n_slots - sum(map(len, in_use.values()))
        experts = range(len(own.tensors))[: max(0, n_free)]
        self._directory.access(layer)
        missing = [e for e in experts if not self._directory.has(layer, e)]
        with self._admission(layer) as admitted:
            self._begin(self._admit(layer, missing, {**in_use, layer: experts}, admitted))
            self._prefetched = layer, frozenset(missing)

    def _end_earlier(self, check: Check | None) -> tuple[int, frozenset[int]] | None:
        """End what earlier calls left: given up reads and a prefetch, which is returned."""
        self._readers.check_open()
        self._forget_left(check)
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            layer, experts = prefetched
            with self._admission(layer) as admitted:
                admitted += experts
                self._readers.stall_for(self._reads, layer, check)
                self._readers.check_unchanged()
        return prefetched

    @contextmanager
    def _admission(self, layer: int) -> Iterator[list[int]]:
        """Yield a list for the experts that are admitted; forget them if the block fails."""
        admitted: list[int] = []
        try:
            yield admitted
        except BaseException:
            # A read may never end (a dead network mount): the next access waits for it before its
            # pages are freed.
            self._left = [(layer, expert) for expert in admitted]
            for read in self._reads:
                read.cancel()
            if not wait(self._reads, 0).not_done:
                self._forget_left()
            raise

    def _forget_left(self, check: Check | None = None) -> None:
        """Forget the experts that an abandoned access has begun to fetch."""
        if self._left:
            self._readers.wait_for(self._reads, check)
        while self._left:
            layer, expert = self._left.pop()
            self._directory.forget(layer, expert)
            self._unneeded += self._leave(layer, expert)
        self._give_up()

    def _give_up(self) -> None:
        """Free memory and mappings of unneeded pages; pages that were moved left their mapping."""
        while self._unneeded:
            region, run = self._unneeded[-1]
            reserve(n_bytes_of(run), region.at(run))
            self._unneeded.pop()

    def _count_mappings(self) -> None:
        """Decide whether pages may move: they become mappings, whose number is limited."""
        if self._n_uncounted >= _EXPERTS_OF_A_COUNT:
            self._may_move = n_mappings() < _SHARE_OF_MAPPINGS * max_mappings()
            self._n_uncounted = 0

    def _count(self, layer: int, n_asked: int, n_missing: int) -> None:
        stats, own = self.stats, self._capacity.layers[layer]
        stats.n_asked += n_asked
        stats.n_hits += n_asked - n_missing
        if self._was_full and own is not None and is_of_one_row(n_asked, own):
            stats.n_asked_full += n_asked
            stats.n_hits_full += n_asked - n_missing

    def _admit(
        self,
        layer: int,
        missing: Iterable[int],
        in_use: Mapping[int, Collection[int]],
        admitted: list[int],
    ) -> list[Fetched]:
        """Give experts their pages, first those of evicted ones; return the pages to be read."""
        lacking: list[Fetched] = []
        for expert in missing:
            self._directory.admit(layer, expert, in_use[layer])
            admitted.append(expert)
            lacking += [(r, run) for r in self._regions[layer] for run in r.use(expert)]
        self._n_used_bytes += sum(n_bytes_of(run) for _, run in lacking)
        try:
            self._evict_surplus(layer, in_use)
            _move(self._unneeded if self._may_move else (), lacking)
        finally:
            self._give_up()
        return lacking

    def _evict_surplus(self, layer: int, in_use: Mapping[int, Collection[int]]) -> None:
        """Evict experts until the cache fits its limit; their pages stay in memory for now."""
        while self._n_used_bytes > self._max_bytes:
            self._was_full = True
            victim = self._directory.evict(in_use)
            if victim is None:
                n_experts = len(in_use[layer])
                needed = n_experts * self._capacity.slot_bytes
                raise SpecdecError(
                    f"layer {layer} needs {n_experts} experts at once, {format_bytes(needed)}, "
                    f"more than the {format_bytes(self._max_bytes)} for them: raise the memory "
                    f"budget by {format_bytes(needed - self._max_bytes)}"
                )
            self._unneeded += self._leave(*victim)

    def _leave(self, layer: int, expert: int) -> list[Fetched]:
        """Return the pages that are not needed without this expert; they no longer count."""
        left = [(r, run) for r in self._regions[layer] for run in r.leave(expert)]
        self._n_used_bytes -= sum(n_bytes_of(run) for _, run in left)
        return left

    def _begin(self, fetched: Iterable[Fetched]) -> None:
        """Begin to read all pages, in the order of the file, many reads at a time."""
        parts = sorted(
            ((region, part) for region, run in joined(fetched) for part in split(run, _READ_BYTES)),
            key=lambda x: (str(x[0].span.path), x[0].span.start, x[1]),
        )
        # One by one: if the pool refuses one, the reads that it has are still waited for.
        self._reads = []
        for part in parts:
            self._reads.append(self._begin_one(*part))

    def _begin_one(self, region: Region, run: Pages) -> Future[Failure]:
        n_bytes, start = n_bytes_of(run), region.span.inner.start + run[0] * PAGE_BYTES
        read_chunk = ReadChunk(region.span.path, start, 0, n_bytes, n_bytes)
        return self._readers.begin(read_chunk, partial(_populated, region.at(run), n_bytes))

    def _all(self) -> Iterator[Region]:
        """Return the regions that have pages of their own."""
        return (r for regions in self._regions.values() for r in regions if r.n_bytes)

    def _paths(self) -> set[Path]:
        return {region.span.path for region in self._all()}

    def close(self) -> bool:
        """Free threads, files and memory; the addresses stay reserved. Idempotent.

        Returns False if a read does not return: its pages are in use and must stay mapped."""
        if not self._readers.close():
            return False
        if not self._is_closed:
            self._is_closed = True
            for region in self._all():
                reserve(region.n_bytes, region.address)
        return True


def _populated(address: int, n_bytes: int) -> memoryview:
    populate(address, n_bytes)
    return view(address, n_bytes)


def _move(freed: Iterable[Fetched], lacking: Iterable[Fetched]) -> None:
    """Move pages of evicted experts to those fetched, and map new pages for what is lacking.

    Moving 216 pages takes 17 us; freeing them and mapping as many new ones, which the kernel
    clears, takes 425. Each move is within one mapping (`Region.pieces`), as the kernel requires;
    large runs go where much is lacking, which leaves little of either.
    """
    pieces = sorted((x for region, run in freed for x in region.pieces(run)), key=_size)
    moves: list[Move] = []
    for region, run in sorted(lacking, key=_size, reverse=True):
        source, read_chunk = pieces.pop() if pieces else (region, (0, 0))
        middle = run[0] + min(run[1] - run[0], read_chunk[1] - read_chunk[0])
        moved, new = (run[0], middle), (middle, run[1])
        if n_bytes_of(moved):
            moves.append(Move(source.at(read_chunk), region.at(run), n_bytes_of(moved)))
            region.note_mapping(moved)
        if n_bytes_of(new):
            prepare(region.at(new), n_bytes_of(new), huge=False)
            keep_from_children(region.at(new), n_bytes_of(new))
            region.note_mapping(new)
    move_pages(moves, [])


def _size(fetched: Fetched) -> int:
    return n_bytes_of(fetched[1])
