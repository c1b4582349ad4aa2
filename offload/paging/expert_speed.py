"""How long missing experts take on this machine, measured once with the caches themselves.

That is more than the storage's bandwidth says, which is measured with long reads: an expert is a
few reads of a MB or two, and the pages that they go to are taken from other experts. So the caches
are asked for experts that they do not have, and the time that takes is kept, as the storage's
bandwidth is, and as little under a limit on reading.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.experts.cache import ExpertCache
from offload.experts.readers import ExpertStats
from offload.paging.address_space import MappedRange, reserve, unmap
from offload.paging.experts import PagedExperts
from offload.process.others import beside_others
from offload.process.remembered import cache_folder, recall_figure, remember_figure
from offload.residency.experts import ExpertRoom, LayerExperts
from offload.storage.aligned import page_up
from offload.storage.direct_io import DirectFile
from offload.storage.read_limit import read_limit_in_force

_SECONDS = 0.5
_WARM_UP_SECONDS = 0.1  # the first experts find free room, and limits on reading allow a burst
_LEAST_BYTES = 64 << 20  # a shorter measurement is not worth remembering
_FIGURE = "seconds_per_byte"

Bring = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True)
class _Bringer:
    """A cache of its own, with little room."""

    bring: Bring
    stats: ExpertStats


@dataclass(frozen=True)
class _Visit:
    """What it brought, and how long it took."""

    began: float
    seconds: float
    n_bytes: float


def missing_seconds_per_byte(layers: Sequence[LayerExperts | None]) -> float:
    """Of weights of experts that are not in memory, all that bringing them takes.

    Takes memory for the experts of a token in one layer, less than any run needs.

    Raises:
        StorageError: a file cannot be read.
        MemoryError: the memory cannot be had.
        AddressSpaceError: the system cannot page experts.
    """
    paths = _paths(layers)
    cache = cache_folder() / _name(layers, paths[0])
    is_limited = any(read_limit_in_force(path) is not None for path in paths)
    known = None if is_limited else _sane((recall_figure(cache) or {}).get(_FIGURE))
    if known is not None:
        return known
    with beside_others() as others:
        n_bytes, seconds = _measure(layers, paths)
    found = seconds / n_bytes
    if n_bytes >= _LEAST_BYTES and not is_limited and not others.are_busy:
        remember_figure(cache, {_FIGURE: found}, "how fast missing experts are brought")
    return found


def _measure(layers: Sequence[LayerExperts | None], paths: Sequence[Path]) -> tuple[float, float]:
    """(bytes of weights, seconds that bringing them took)."""
    for path in paths:
        file = DirectFile(path)
        file.drop_cached()  # what somebody read or wrote lately would be no storage's speed
        file.close()
    with _bringer(ExpertRoom(tuple(layers), _n_slots(layers)), paths) as one:
        started = time.perf_counter()
        warm, end = started + _WARM_UP_SECONDS, started + _WARM_UP_SECONDS + _SECONDS
        visits: list[_Visit] = []
        while not visits or visits[-1].began < end:
            visits.append(_visit(one, layers))
    counted = [visit for visit in visits if visit.began >= warm and visit.n_bytes] or visits
    return sum(visit.n_bytes for visit in counted), sum(visit.seconds for visit in counted)


def _visit(one: _Bringer, layers: Sequence[LayerExperts | None]) -> _Visit:
    """Of any layer, with as many experts as are counted to miss."""
    layer, experts = random.choice([(i, x) for i, x in enumerate(layers) if x is not None])
    asked = random.sample(range(len(experts.tensors)), _n_missing(experts))
    found_before = one.stats.n_hits
    began = time.perf_counter()
    one.bring(layer, asked)
    seconds = time.perf_counter() - began
    n_missing = len(asked) - (one.stats.n_hits - found_before)
    return _Visit(began, seconds, n_missing * experts.n_bytes / len(experts.tensors))


@contextmanager
def _bringer(room: ExpertRoom, paths: Sequence[Path]) -> Iterator[_Bringer]:
    """The cache that computes with such experts, at addresses of its own."""
    if not any(x.is_at_once for x in room.layers if x is not None):
        cache = ExpertCache(room)
        try:
            yield _Bringer(lambda layer, ids: _exhaust(cache, layer, ids), cache.stats)
        finally:
            cache.close()
        return
    with ExitStack() as reserved:
        paged = PagedExperts(room, {path: [_reserved(path, reserved)] for path in paths})
        try:
            yield _Bringer(paged.bring, paged.stats)
        finally:
            if not paged.close():
                reserved.pop_all()  # a read goes on: its pages stay


def _exhaust(cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
    for _ in cache.bring(layer, experts):
        pass


def _reserved(path: Path, into: ExitStack) -> MappedRange:
    """Address space for a whole file."""
    n_bytes = page_up(path.stat().st_size)
    address = reserve(n_bytes)
    into.callback(unmap, address, n_bytes)
    return MappedRange(address, n_bytes, 0)


def _n_missing(experts: LayerExperts) -> int:
    """Of a visit: half of what a token asks for. One alone took a fifth longer for each byte than
    two to four of 6 MB, which were equal."""
    return max(1, experts.n_used // 2)


def _n_slots(layers: Sequence[LayerExperts | None]) -> int:
    return max(x.n_used for x in layers if x is not None)


def _paths(layers: Sequence[LayerExperts | None]) -> list[Path]:
    own = (x for x in layers if x is not None)
    return sorted({r.path for x in own for tensors in x.tensors for r in tensors})


def _name(layers: Sequence[LayerExperts | None], path: Path) -> str:
    """Of the file of the figure: of a device, a kind of cache, and experts of one size."""
    largest = max((x for x in layers if x is not None), key=lambda x: x.slot_bytes)
    kind = "moved" if largest.is_at_once else "slots"
    counts = f"{largest.slot_bytes}-{len(largest.tensors[0])}-{_n_missing(largest)}"
    return f"missing-experts-{path.stat().st_dev}-{kind}-{counts}.json"


def _sane(kept: object) -> float | None:
    return kept if isinstance(kept, float) and math.isfinite(kept) and kept > 0 else None
