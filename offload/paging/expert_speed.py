"""Time to fetch missing experts on this machine, measured once with the caches themselves.

It is longer than the storage's bandwidth suggests, which is measured with long reads: an expert is
a few reads of a MB or two, into pages that are taken from other experts. So the caches are asked
for experts that they do not have. The result goes to the disk cache as the storage's bandwidth
does, and like it not under a read limit.
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
from offload.placement.experts import ExpertCachePlan, LayerExperts
from offload.process.disk_cache import (
    cache_folder,
    load_cached_measurement,
    save_cached_measurement,
)
from offload.process.other_processes import beside_other_processes
from offload.storage.aligned import page_up
from offload.storage.direct_io import DirectFile
from offload.storage.read_limit import read_limit_in_force

_SECONDS = 0.5
_WARM_UP_SECONDS = 0.1  # the first experts find free memory, and read limits allow a burst
_MIN_BYTES = 64 << 20  # a shorter measurement is not worth caching
_FIGURE = "seconds_per_byte"

Fetch = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True)
class _Fetcher:
    """An expert cache of its own, with little memory."""

    fetch: Fetch
    stats: ExpertStats


@dataclass(frozen=True)
class _Access:
    """One access: the bytes of experts fetched, and the seconds it took."""

    began: float
    seconds: float
    n_bytes: float


def missing_seconds_per_byte(layers: Sequence[LayerExperts | None]) -> float:
    """Return the seconds per byte of expert weights that fetching missing experts takes in all.

    Takes memory for one token's experts in one layer, less than any run needs.

    Raises:
        StorageError: a file cannot be read.
        MemoryError: the memory cannot be had.
        AddressSpaceError: the system cannot page experts.
    """
    paths = _paths(layers)
    cache = cache_folder() / _name(layers, paths[0])
    is_limited = any(read_limit_in_force(path) is not None for path in paths)
    known = None if is_limited else _sane((load_cached_measurement(cache) or {}).get(_FIGURE))
    if known is not None:
        return known
    with beside_other_processes() as load:
        n_bytes, seconds = _measure(layers, paths)
    result = seconds / n_bytes
    if n_bytes >= _MIN_BYTES and not is_limited and not load.are_busy:
        save_cached_measurement(cache, {_FIGURE: result}, "how fast missing experts are fetched")
    return result


def _measure(layers: Sequence[LayerExperts | None], paths: Sequence[Path]) -> tuple[float, float]:
    """Return (bytes of weights, seconds that fetching them took)."""
    for path in paths:
        file = DirectFile(path)
        file.drop_cached()  # recently read or written pages would hide the storage's speed
        file.close()
    with _fetcher(ExpertCachePlan(tuple(layers), _n_slots(layers)), paths) as fetcher:
        started = time.perf_counter()
        warm, end = started + _WARM_UP_SECONDS, started + _WARM_UP_SECONDS + _SECONDS
        accesses: list[_Access] = []
        while not accesses or accesses[-1].began < end:
            accesses.append(_access(fetcher, layers))
    counted = [access for access in accesses if access.began >= warm and access.n_bytes] or accesses
    return sum(access.n_bytes for access in counted), sum(access.seconds for access in counted)


def _access(fetcher: _Fetcher, layers: Sequence[LayerExperts | None]) -> _Access:
    """Access a random layer with as many experts as a token is assumed to miss."""
    layer, experts = random.choice([(i, x) for i, x in enumerate(layers) if x is not None])
    asked = random.sample(range(len(experts.tensors)), _n_missing(experts))
    hits_before = fetcher.stats.n_hits
    began = time.perf_counter()
    fetcher.fetch(layer, asked)
    seconds = time.perf_counter() - began
    n_missing = len(asked) - (fetcher.stats.n_hits - hits_before)
    return _Access(began, seconds, n_missing * experts.n_bytes / len(experts.tensors))


@contextmanager
def _fetcher(expert_cache: ExpertCachePlan, paths: Sequence[Path]) -> Iterator[_Fetcher]:
    """Yield the cache that is used with such experts, at addresses of its own."""
    if not any(x.is_at_once for x in expert_cache.layers if x is not None):
        cache = ExpertCache(expert_cache)
        try:
            yield _Fetcher(lambda layer, ids: _exhaust(cache, layer, ids), cache.stats)
        finally:
            cache.close()
        return
    with ExitStack() as reserved:
        paged = PagedExperts(expert_cache, {path: [_reserved(path, reserved)] for path in paths})
        try:
            yield _Fetcher(paged.fetch, paged.stats)
        finally:
            if not paged.close():
                reserved.pop_all()  # a read goes on: its pages stay


def _exhaust(cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
    for _ in cache.fetch(layer, experts):
        pass


def _reserved(path: Path, into: ExitStack) -> MappedRange:
    """Reserve address space for a whole file."""
    n_bytes = page_up(path.stat().st_size)
    address = reserve(n_bytes)
    into.callback(unmap, address, n_bytes)
    return MappedRange(address, n_bytes, 0)


def _n_missing(experts: LayerExperts) -> int:
    """Return the misses per access: half of what a token asks for. A single one took a fifth longer
    per byte than two to four of 6 MB, which were equal."""
    return max(1, experts.n_used // 2)


def _n_slots(layers: Sequence[LayerExperts | None]) -> int:
    return max(x.n_used for x in layers if x is not None)


def _paths(layers: Sequence[LayerExperts | None]) -> list[Path]:
    own = (x for x in layers if x is not None)
    return sorted({r.path for x in own for tensors in x.tensors for r in tensors})


def _name(layers: Sequence[LayerExperts | None], path: Path) -> str:
    """Return the cache file's name: per device, kind of expert cache, and size of the experts."""
    largest = max((x for x in layers if x is not None), key=lambda x: x.slot_bytes)
    kind = "moved" if largest.is_at_once else "slots"
    counts = f"{largest.slot_bytes}-{len(largest.tensors[0])}-{_n_missing(largest)}"
    return f"missing-experts-{path.stat().st_dev}-{kind}-{counts}.json"


def _sane(cached: object) -> float | None:
    return cached if isinstance(cached, float) and math.isfinite(cached) and cached > 0 else None
