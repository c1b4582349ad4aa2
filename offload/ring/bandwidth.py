"""The storage's bandwidth on this machine, measured once with the streamer's own kind of reads, and
raised by faster ones of runs.

A cgroup's read limit (`offload.storage.read_limit`) is not the device's bandwidth: under one the
disk cache is neither written nor used.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.process.disk_cache import (
    cache_folder,
    load_cached_measurement,
    save_cached_measurement,
)
from offload.process.other_processes import beside_other_processes
from offload.ring.slots import StreamerClosed
from offload.ring.streamer import StreamStats, WeightStreamer
from offload.storage.direct_io import DirectFile, StorageError
from offload.storage.read_limit import read_limit_in_force
from offload.storage.reading import DEFAULT_N_READERS, DEFAULT_READ_BYTES
from offload.units import GIB, MIB, format_bytes

_CHUNK_BYTES = 64 * MIB  # two of these are in memory while measuring
_MIN_BYTES = 64 * MIB  # a shorter measurement is not worth caching
_SECONDS = 0.4  # of five results beside other work, all were within 10 % of those of 0.8 s
_WARM_UP_SECONDS = 0.1  # limits on reading allow a burst at first
_MIN_RUN_BYTES = GIB  # shorter runs may have read in a burst


@dataclass(frozen=True)
class DeviceProfile:
    """The storage that holds one file."""

    storage_bytes_per_second: float
    read_bytes: int  # size of one read
    n_readers: int  # reads at a time
    direct: bool  # O_DIRECT worked; otherwise the page cache may have made the result too high
    measured_at: float  # seconds since the epoch
    device: int  # st_dev of the file


def measure_storage(
    path: Path,
    n_bytes: int = 16 * GIB,
    *,
    seconds: float = _SECONDS,
    read_bytes: int = DEFAULT_READ_BYTES,
    n_readers: int = DEFAULT_N_READERS,
    refresh: bool = False,
    cache_dir: Path | None = None,
) -> DeviceProfile:
    """Measure the bandwidth of reading `path` with `n_readers` threads; cached on disk per device.

    Args:
        path: a real weight file, read from a random offset on: a cache below the file system may
            still have what was read last time.
        n_bytes, seconds: the reading ends at the first of these; a small file is read once.
        refresh: measure even if a result is cached.
        cache_dir: folder of the disk cache; by default $XDG_CACHE_HOME/specdec.

    Raises:
        StorageError: the file cannot be read, or is empty.
    """
    try:
        device = path.stat().st_dev
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror or error}") from error
    folder = cache_folder() if cache_dir is None else cache_dir
    cache = folder / _cache_name(device, read_bytes, n_readers)
    is_limited = read_limit_in_force(path) is not None
    if not refresh and not is_limited and (known := _load(cache)) is not None:
        return known
    file = DirectFile(path)
    direct = file.direct
    file.drop_cached()  # recently read or written pages would hide the storage's speed
    file.close()
    with beside_other_processes() as load:
        stats = _stream(path, n_bytes, seconds, read_bytes, n_readers)
    bandwidth = stats.bytes_read / max(stats.read_seconds, 1e-9)
    profile = DeviceProfile(bandwidth, read_bytes, n_readers, direct, time.time(), device)
    if stats.bytes_read >= _MIN_BYTES and not is_limited and not load.are_busy:
        save_cached_measurement(cache, asdict(profile), "the measured storage speed")
    return profile


def correct_storage(
    path: Path, n_bytes: int, read_seconds: float, cache_dir: Path | None = None
) -> None:
    """Replace the cached bandwidth of the storage that holds `path` if a run's own reads, with the
    default number of readers, were faster.

    A measurement takes 0.4 seconds, and a virtual machine's storage may be twice as fast an hour
    later. Slower reads show nothing: they may have paused while the run computed.
    """
    if n_bytes < _MIN_RUN_BYTES or not path.exists():
        return
    folder = cache_folder() if cache_dir is None else cache_dir
    cache = folder / _cache_name(path.stat().st_dev, DEFAULT_READ_BYTES, DEFAULT_N_READERS)
    known, bandwidth = _load(cache), n_bytes / max(read_seconds, 1e-9)
    if known is not None and known.direct and bandwidth > known.storage_bytes_per_second:
        corrected = replace(known, storage_bytes_per_second=bandwidth)
        save_cached_measurement(cache, asdict(corrected), "the storage speed of this run")


def is_in_disk_cache(profile: DeviceProfile, cache_dir: Path | None = None) -> bool:
    """Return whether a result is in the disk cache: it is not if the file was too small, the disk
    was busy, or reading is limited."""
    folder = cache_folder() if cache_dir is None else cache_dir
    name = _cache_name(profile.device, profile.read_bytes, profile.n_readers)
    return _load(folder / name) == profile


def why_not_cached(path: Path) -> str:
    """Return why a measurement with this file is not in the disk cache."""
    if not is_measurable(path):
        return f"as the file has less than {format_bytes(_MIN_BYTES)}"
    if read_limit_in_force(path) is not None:
        return "as a cgroup limits reading"
    return "as other programs were busy, or the cache folder cannot be written"


def _cache_name(device: int, read_bytes: int, n_readers: int) -> str:
    return f"storage-{device}-{read_bytes}-{n_readers}.json"


def is_measurable(path: Path) -> bool:
    """Return whether the file is large enough to be measured."""
    return path.stat().st_size >= _MIN_BYTES


@contextmanager
def busy_storage(path: Path) -> Iterator[None]:
    """Read `path` over and over, as a forward pass does, while something else is timed.

    Raises StorageError, at the end, if the file could not be read.
    """
    layers = _chunks(path, path.stat().st_size, DEFAULT_READ_BYTES, DEFAULT_N_READERS)
    errors: list[BaseException] = []

    def read_in_a_loop() -> None:
        try:
            while True:
                for index in range(len(layers)):
                    with streamer.layer(index):
                        pass
        except StreamerClosed:
            return
        except BaseException as error:
            errors.append(error)

    with WeightStreamer(layers, 2) as streamer:
        thread = threading.Thread(target=read_in_a_loop, name="specdec-busy-storage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            streamer.close()
            thread.join()
    for error in errors:
        raise error


def _stream(
    path: Path, n_bytes: int, seconds: float, read_bytes: int, n_readers: int
) -> StreamStats:
    """Stream the file as layers of a few reads each, without using them."""
    layers = _chunks(path, n_bytes, read_bytes, n_readers)
    size = path.stat().st_size
    n_passes = 1 if size < _MIN_BYTES else -(-n_bytes // size)
    with WeightStreamer(layers, 2, read_bytes=read_bytes, n_readers=n_readers) as streamer:
        started = time.perf_counter()
        burst: StreamStats | None = None
        for index in list(range(len(layers))) * n_passes:
            with streamer.layer(index):
                pass
            passed = time.perf_counter() - started
            if burst is None and passed > _WARM_UP_SECONDS:
                burst = streamer.stats
            if passed > seconds:
                break
        stats = streamer.stats
        later = stats if burst is None else stats - burst
        return later if later.bytes_read >= _MIN_BYTES else stats


def _chunks(path: Path, n_bytes: int, read_bytes: int, n_readers: int) -> list[LayerWeights]:
    """Return about `n_bytes` of the file in chunks, as layers, from a random one on."""
    size = path.stat().st_size
    if size <= 0:
        raise StorageError(f"{path} is empty; measure with a weight file")
    chunk = min(read_bytes * n_readers, _CHUNK_BYTES)
    starts = list(range(0, size, chunk))
    first = random.randrange(len(starts))
    layers = []
    for start in (starts[first:] + starts[:first])[: -(-n_bytes // chunk)]:
        n = min(chunk, size - start)
        layers.append(LayerWeights((TensorRecord(f"@{start}", "U8", (n,), path, start, n),)))
    return layers


# --- the disk cache: a result that is lost is only measured again ---------------------------------


def _load(cache: Path) -> DeviceProfile | None:
    try:
        profile = DeviceProfile(**(load_cached_measurement(cache) or {}))
    except TypeError:  # fields of another version, or none
        return None
    return profile if _is_sane(profile) else None


def _is_sane(profile: DeviceProfile) -> bool:
    values: dict[str, Any] = {f.name: getattr(profile, f.name) for f in fields(profile)}
    if not isinstance(values.pop("direct"), bool):
        return False
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values.values()):
        return False
    return profile.storage_bytes_per_second > 0
