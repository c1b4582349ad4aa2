"""The storage is measured once; a broken cache costs a measurement, not a run."""

from __future__ import annotations

import itertools
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from offload.process import other_processes
from offload.process.disk_cache import save_cached_measurement
from offload.ring import bandwidth as profile
from offload.ring.bandwidth import (
    DeviceProfile,
    correct_storage,
    is_in_disk_cache,
    measure_storage,
)
from offload.ring.streamer import StreamStats
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError
from offload.storage.page_cache import is_cached
from offload.units import GIB, MIB


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(3 * MIB + 17))
    return path


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count measurements, which take no time and count as long enough."""
    made: list[int] = []

    def stream(
        path: Path, n_bytes: int, seconds: float, read_bytes: int, n_readers: int
    ) -> StreamStats:
        made.append(n_bytes)
        return StreamStats(bytes_read=1000, read_seconds=0.5)

    monkeypatch.setattr(profile, "_stream", stream)
    monkeypatch.setattr(profile, "_MIN_BYTES", 1000)
    return made


def test_a_real_measurement(weights: Path, tmp_path: Path) -> None:
    actual = measure_storage(
        weights, MIB, read_bytes=64 * 1024, n_readers=2, cache_dir=tmp_path / "cache"
    )
    assert actual.storage_bytes_per_second > 0
    assert (actual.read_bytes, actual.n_readers) == (64 * 1024, 2)
    assert actual.device == weights.stat().st_dev
    assert not (tmp_path / "cache").exists()  # the measurement is too short to cache


def test_what_the_page_cache_has_is_not_measured(weights: Path, tmp_path: Path) -> None:
    """A file system may read through the page cache regardless of the flag."""
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
        assert is_cached(file.fileno(), 0)
        measure_storage(weights, MIB, cache_dir=tmp_path / "cache")
        assert not any(is_cached(file.fileno(), page * ALIGNMENT) for page in range(3 * 256))


def test_a_file_smaller_than_one_read(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 10)
    assert measure_storage(path, cache_dir=tmp_path).storage_bytes_per_second > 0


def test_measured_once(weights: Path, tmp_path: Path, measurements: list[int]) -> None:
    first = measure_storage(weights, cache_dir=tmp_path / "cache")
    assert first.storage_bytes_per_second == 2000
    assert measure_storage(weights, cache_dir=tmp_path / "cache") == first
    assert len(measurements) == 1
    again = measure_storage(weights, cache_dir=tmp_path / "cache", refresh=True)
    assert again.measured_at >= first.measured_at
    measure_storage(weights, cache_dir=tmp_path / "cache", n_readers=1)
    assert len(measurements) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 2  # and no temporary file


def measured_at_2000(weights: Path, folder: Path, *, direct: bool = True) -> DeviceProfile:
    """Return a measurement of 2000 bytes per second that is in the disk cache."""
    before = replace(measure_storage(weights, cache_dir=folder), direct=direct)
    (cache,) = folder.iterdir()
    cache.write_text(json.dumps(asdict(before)))
    return before


@pytest.mark.parametrize(
    ("n_bytes", "read_seconds", "bandwidth"),
    [
        (2 * GIB, 1.0, 2 * GIB),
        (2 * GIB, 2.0 * GIB, 2000),  # slower: reads may have paused
        (GIB - 1, 0.1, 2000),  # too short
    ],
)
def test_faster_reads_of_a_run_correct_the_measurement(
    weights: Path,
    tmp_path: Path,
    measurements: list[int],
    n_bytes: int,
    read_seconds: float,
    bandwidth: float,
) -> None:
    measured_at_2000(weights, tmp_path / "cache")
    correct_storage(weights, n_bytes, read_seconds, tmp_path / "cache")
    after = measure_storage(weights, cache_dir=tmp_path / "cache")
    assert len(measurements) == 1
    assert after.storage_bytes_per_second == bandwidth


def test_nothing_is_corrected_that_was_not_measured_or_comes_from_a_page_cache(
    weights: Path, tmp_path: Path, measurements: list[int]
) -> None:
    correct_storage(weights, 2 * GIB, 1.0, tmp_path / "none")
    correct_storage(tmp_path / "deleted", 2 * GIB, 1.0, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    measured_at_2000(weights, tmp_path / "cache", direct=False)
    correct_storage(weights, 2 * GIB, 1.0, tmp_path / "cache")
    assert measure_storage(weights, cache_dir=tmp_path / "cache").storage_bytes_per_second == 2000


def test_measurements_beside_other_programs_are_not_cached(
    weights: Path, tmp_path: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", lambda: float(next(seconds)))
    measure_storage(weights, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    measure_storage(weights, cache_dir=tmp_path / "cache")
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"storage_bytes_per_second": 1}', "[" * 100_000, b"\xff\xff"],
)
def test_a_corrupt_cache_is_ignored(
    weights: Path, tmp_path: Path, measurements: list[int], text: str | bytes
) -> None:
    measure_storage(weights, cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert measure_storage(weights, cache_dir=tmp_path / "cache").storage_bytes_per_second == 2000
    assert len(measurements) == 2
    assert DeviceProfile(**json.loads(cache.read_text()))  # it recovered


@pytest.mark.parametrize(
    "change",
    [
        {"storage_bytes_per_second": 0},
        {"storage_bytes_per_second": -5.0},
        {"storage_bytes_per_second": float("inf")},
        {"storage_bytes_per_second": float("nan")},
        {"storage_bytes_per_second": "fast"},
        {"direct": 1},
        {"n_readers": True},
        {"measured_at": None},
        {"extra": 1},
    ],
)
def test_nonsense_in_the_cache_is_ignored(
    weights: Path, tmp_path: Path, measurements: list[int], change: dict[str, object]
) -> None:
    measure_storage(weights, cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_text(json.dumps({**json.loads(cache.read_text()), **change}))
    measure_storage(weights, cache_dir=tmp_path / "cache")
    assert len(measurements) == 2


def test_the_cache_follows_the_environment(
    weights: Path, tmp_path: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    measure_storage(weights)
    assert list((tmp_path / "xdg" / "specdec").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    measure_storage(weights)
    assert list((tmp_path / "home" / ".cache" / "specdec").iterdir())


def test_a_cache_that_cannot_be_written(
    weights: Path, tmp_path: Path, measurements: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for _ in range(2):
        caplog.clear()
        measure_storage(weights, cache_dir=blocked)
        assert caplog.messages == [
            f"the measured storage speed is not cached: {blocked}: File exists; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ]
    assert len(measurements) == 2


def test_files_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open"):
        measure_storage(tmp_path / "none", cache_dir=tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(StorageError, match="is empty"):
        measure_storage(tmp_path / "empty", cache_dir=tmp_path)


def test_a_failing_rename_leaves_no_temporary_file(
    weights: Path, tmp_path: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    measure_storage(weights, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_read_too_fast_is_read_again(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def n_read() -> int:
        return profile._stream(weights, 9 * MIB, 100.0, 64 * 1024, 2).bytes_read

    assert n_read() < 4 * MIB  # too small for its speed to mean anything
    monkeypatch.setattr(profile, "_MIN_BYTES", 1)
    monkeypatch.setattr(profile, "_WARM_UP_SECONDS", 1000.0)  # all of it counts, however slow
    assert n_read() >= 9 * MIB


def test_storage_is_kept_busy_for_as_long_as_something_is_timed(weights: Path) -> None:
    n_before = threading.active_count()
    with profile.busy_storage(weights):
        assert threading.active_count() > n_before
    assert threading.active_count() == n_before
    assert not profile.is_measurable(weights)


def test_a_short_measurement_is_not_called_cached(tmp_path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x" * 4096)
    profile = measure_storage(small, cache_dir=tmp_path / "cache")
    assert not is_in_disk_cache(profile, tmp_path / "cache")
    (tmp_path / "cache").mkdir(exist_ok=True)
    name = f"storage-{profile.device}-{profile.read_bytes}-{profile.n_readers}.json"
    save_cached_measurement(tmp_path / "cache" / name, asdict(profile), "a result")
    assert is_in_disk_cache(profile, tmp_path / "cache")
    assert not is_in_disk_cache(replace(profile, measured_at=0.0), tmp_path / "cache")
