"""The time of missing experts is measured once, with the caches themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from system_probes import needs_own_memory
from weight_files import FaultyReads

from offload.experts.cache import ExpertCache
from offload.formats.tensors import TensorRecord
from offload.paging import expert_speed
from offload.paging.expert_speed import missing_seconds_per_byte
from offload.paging.experts import PagedExperts
from offload.placement.experts import LayerExperts
from offload.process import other_processes
from offload.process.disk_cache import cache_folder
from offload.process.memory import process_memory
from offload.storage.direct_io import StorageError
from offload.units import MIB

N_LAYERS, N_EXPERTS, N_USED = 3, 16, 4
SIZE = 60_001
"""Sizes of an expert's two tensors: unaligned, so that neighbours share pages."""
EXPERT_BYTES = 2 * SIZE


@pytest.fixture
def layers(tmp_path: Path) -> tuple[LayerExperts | None, ...]:
    """Layers stacked as in a GGUF file; the first layer has none."""
    path, offset = tmp_path / "experts.bin", 5
    made: list[LayerExperts | None] = [None]
    for layer in range(N_LAYERS):
        stacks = []
        for part in range(2):
            name = f"{layer}.{part}"
            stacks.append(
                [
                    TensorRecord(f"{name}[{e}]", "U8", (SIZE,), path, offset + e * SIZE, SIZE)
                    for e in range(N_EXPERTS)
                ]
            )
            offset += N_EXPERTS * SIZE
        made.append(LayerExperts(tuple(zip(*stacks, strict=True)), N_USED, is_at_once=True))
    path.write_bytes(np.random.default_rng(0).bytes(offset))
    return tuple(made)


@pytest.fixture(params=["paged", "slots"])
def kind(request: pytest.FixtureRequest, layers) -> tuple[LayerExperts | None, ...]:
    """Either kind of cache, over the same experts."""
    at_once = request.param == "paged"
    return tuple(None if x is None else replace(x, is_at_once=at_once) for x in layers)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure briefly on an otherwise idle machine, and count it as long enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(expert_speed, "_SECONDS", 0.05)
    monkeypatch.setattr(expert_speed, "_WARM_UP_SECONDS", 0.01)
    monkeypatch.setattr(expert_speed, "_MIN_BYTES", 1)
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", lambda: 0.0)


def cached() -> list[Path]:
    return sorted(cache_folder().glob("missing-experts-*"))


def test_the_clock_counts_the_bytes_that_were_missing(kind, monkeypatch) -> None:
    """Each access moves the clock by 2 s; half of a token's experts miss at a time."""
    ticks = itertools.count(0, 2)
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(expert_speed, "time", clock)
    monkeypatch.setattr(expert_speed, "_SECONDS", 400.0)
    actual = missing_seconds_per_byte(kind)
    # 4 slots of 48 experts: a tenth of the requested ones may hit by chance.
    assert 2 / (2 * EXPERT_BYTES) <= actual < 1.5 * 2 / (2 * EXPERT_BYTES)


@needs_own_memory
def test_a_real_measurement_gives_everything_back(kind) -> None:
    missing_seconds_per_byte(kind)  # memory loaded on first use
    before = process_memory().rss_bytes
    for path in cached():
        path.unlink()
    assert missing_seconds_per_byte(kind) > 0
    assert process_memory().rss_bytes - before < MIB


def test_each_kind_is_measured_once(layers, monkeypatch) -> None:
    first = missing_seconds_per_byte(layers)
    assert missing_seconds_per_byte(layers) == first
    assert len(cached()) == 1
    in_slots = tuple(None if x is None else replace(x, is_at_once=False) for x in layers)
    missing_seconds_per_byte(in_slots)
    assert len(cached()) == 2


@pytest.mark.parametrize("text", ["", "{}", '{"measured_at": 1e12}', "[1]"])
def test_a_corrupt_measurement_is_repeated(layers, text: str) -> None:
    missing_seconds_per_byte(layers)
    (path,) = cached()
    whole = path.read_text()
    path.write_text(text)
    assert missing_seconds_per_byte(layers) > 0
    assert path.read_text() not in (text, whole)


@pytest.mark.parametrize("value", ["-1.0", "0.0", "NaN", "true", '"1"'])
def test_no_other_value_is_accepted(layers, value: str) -> None:
    missing_seconds_per_byte(layers)
    (path,) = cached()
    began = path.read_text().split('"seconds_per_byte"')[0]
    path.write_text(f'{began}"seconds_per_byte": {value}}}')
    assert 0 < missing_seconds_per_byte(layers) < 1


def test_timings_under_a_read_limit_are_not_cached(layers, monkeypatch) -> None:
    monkeypatch.setattr(expert_speed, "read_limit_in_force", lambda path: 1000)
    assert missing_seconds_per_byte(layers) > 0
    assert cached() == []


def test_a_failed_read_is_reported(kind, monkeypatch) -> None:
    def fault(call: int, length: int) -> None:
        raise StorageError("gone")

    for name, cache in (("PagedExperts", PagedExperts), ("ExpertCache", ExpertCache)):
        broken = partial(cache, storage=FaultyReads(fault).storage)
        monkeypatch.setattr(expert_speed, name, broken)
    with pytest.raises(StorageError, match="gone"):
        missing_seconds_per_byte(kind)
