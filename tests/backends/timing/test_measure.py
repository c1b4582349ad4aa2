"""Timed products for several row counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    actual = measure_curve({4: lambda: made.append(4), 1: lambda: made.append(1)}, 10, small)
    assert actual.num_tokens == (1, 4)
    assert actual.alone == actual.beside_reads == (0.1, 0.1)
    assert set(made) == {1, 4}


def test_beside_reads_few_numbers_of_rows_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A constant slowdown over all row counts is found without timing all of them."""
    now, is_reading, timed = 0.0, False, []

    def product(num_tokens: int) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += num_tokens * (2.0 + num_tokens / 10 if is_reading else 1.0)
            if is_reading:
                timed.append(num_tokens)

        return run

    @contextmanager
    def reading(path: Path) -> Iterator[None]:
        nonlocal is_reading
        is_reading = True
        yield

    monkeypatch.setattr(measure, "busy_storage", reading)
    monkeypatch.setattr(measure, "is_measurable", lambda path: True)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    rows = (1, 2, 4, 8, 16)
    actual = measure_curve({n: product(n) for n in rows}, 1, tmp_path)
    assert actual.alone == rows
    assert actual.beside_reads == pytest.approx([n * (2.0 + n / 10) for n in rows])
    assert set(timed) == {1, 4, 16}
