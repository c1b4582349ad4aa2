"""Products of several numbers of rows, timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.timing import measure as measure
from backends.timing.measure import measure_curve


def test_products_are_timed_per_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clock = iter(range(10**6))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    small = tmp_path / "small"
    small.write_bytes(b"x")
    made: list[int] = []
    found = measure_curve({4: lambda: made.append(4), 1: lambda: made.append(1)}, 10, small)
    assert found.rows == (1, 4)
    assert found.alone == found.beside_reads == (0.1, 0.1)
    assert set(made) == {1, 4}
