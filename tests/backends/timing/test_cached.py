"""Curves measured once a month, and again when passes contradict them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from backends.contract.curve import ComputeCurve
from backends.timing import cached
from backends.timing.cached import cached_curve
from offload.process import disk_cache, other_processes

CURVE = ComputeCurve((1, 4), (0.25, 0.5), (0.25, 1.0))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk_cache, "_in_use", set())
    return tmp_path / "specdec"


@pytest.fixture
def measured() -> list[str]:
    return []


@pytest.fixture
def find(measured: list[str]) -> Callable[..., ComputeCurve]:
    def measure() -> ComputeCurve:
        measured.append("measured")
        return CURVE

    return lambda what="this", reading=None: cached_curve(what, measure, reading)


def test_a_curve_is_measured_once_for_all_that_it_depends_on(find, measured, monkeypatch) -> None:
    assert [find(), find(), find("that"), find("that")] == [CURVE] * 4
    assert len(measured) == 2
    monkeypatch.setattr(cached, "processor", lambda: "another one")
    find()
    assert len(measured) == 3


def test_a_curve_measured_beside_other_programs_is_not_cached(find, measured, monkeypatch) -> None:
    counted = count()  # seconds of a measurement that takes no time
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", lambda: float(next(counted)))
    assert [find(), find()] == [CURVE] * 2
    assert len(measured) == 2
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", lambda: 0.0)
    find()
    find()
    assert len(measured) == 3


def test_a_curve_of_last_month_is_measured_again(find, measured, folder) -> None:
    find()
    (path,) = folder.iterdir()
    figure = json.loads(path.read_text())
    path.write_text(json.dumps({**figure, "measured_at": time.time() - 31 * 86400}))
    find()
    assert len(measured) == 2
    find()
    assert len(measured) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"alone": [0.25]},
        {"alone": [0.25, -1.0]},
        {"alone": [0.25, float("nan")]},
        {"alone": ["x", 1]},
        {"alone": None},
        {"rows": [4, 1]},
        {"rows": [1e400, 4]},
        {"measured_at": "now"},
        {"measured_at": 1e99},
    ],
)
def test_an_invalid_curve_is_measured_again(change: dict[str, Any], find, measured, folder) -> None:
    find()
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert find() == CURVE
    assert len(measured) == 2


def test_contradicted_measurements_are_repeated(find, measured, folder) -> None:
    find()
    find("that")
    disk_cache.forget_measurements()
    assert not list(folder.iterdir())
    find()
    assert len(measured) == 3


def test_below_a_limit_on_reading_nothing_is_cached(find, measured, folder, monkeypatch) -> None:
    monkeypatch.setattr(cached, "read_limit_in_force", lambda path: 10**6)
    find(reading=Path(__file__))
    find(reading=Path(__file__))
    assert len(measured) == 2
    assert not folder.exists()
