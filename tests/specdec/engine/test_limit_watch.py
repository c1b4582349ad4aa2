"""A memory limit that others lower is noticed between steps; beams are not cut short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.process.memory import MemoryLimit
from offload.storage.direct_io import StorageError
from offload.units import MIB
from specdec.checks import ConfigError
from specdec.engine.budget import (
    RETRY_SECONDS,
    WATCH_SECONDS,
    BeamsRunning,
    LimitWatch,
    check_beams,
)
from specdec.run_options import RunOptions


class Watched:
    """A process with a limit, a budget and a clock."""

    def __init__(self, smallest_bytes: int = 0) -> None:
        self.limit_bytes, self.budget_bytes, self.seconds = 500 * MIB, 400 * MIB, 0.0
        self.num_reads, self._smallest_bytes = 0, smallest_bytes
        self.num_changes, self.errors = 0, list[Exception]()
        self._watch = LimitWatch(self._change, self._limit, lambda: self.seconds)

    def _limit(self) -> MemoryLimit:
        self.num_reads += 1
        return MemoryLimit(self.limit_bytes, "cgroup v2 /box")

    def _change(self, n_bytes: int, source: str) -> None:
        assert source == "cgroup v2 /box"
        self.num_changes += 1
        if self.errors:
            raise self.errors.pop(0)
        if n_bytes < self._smallest_bytes:
            raise ConfigError("too small")
        self.budget_bytes = n_bytes

    def step(self, seconds: float = WATCH_SECONDS) -> None:
        self.seconds += seconds
        self._watch.check(self.budget_bytes)


def test_the_limit_is_read_once_a_second() -> None:
    watched = Watched()
    for _ in range(100):
        watched.step(0.25)
    assert watched.num_reads == 25


def test_the_budget_follows_a_smaller_limit_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for limit in (450, 400, 300, 300, 350):
        watched.limit_bytes = limit * MIB
        watched.step()
    assert watched.budget_bytes == 300 * MIB
    (line,) = caplog.messages
    assert line == (
        "the limit of this process (cgroup v2 /box) is 300.00 MiB now: the memory budget follows "
        "it, from 400.00 MiB"
    )


def test_a_limit_that_cannot_hold_the_run_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(smallest_bytes=350 * MIB)
    watched.limit_bytes = 300 * MIB
    for _ in range(3):
        watched.step()
    assert watched.budget_bytes == 400 * MIB
    (line,) = caplog.messages
    assert line.endswith("below the memory budget, which stays as it is: too small")
    watched.limit_bytes = 360 * MIB
    watched.step()
    assert watched.budget_bytes == 360 * MIB


def test_a_limit_is_followed_once_a_beam_search_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.errors = [BeamsRunning("12 beams"), BeamsRunning("12 beams"), BeamsRunning("12 beams")]
    watched.limit_bytes = 300 * MIB
    for _ in range(21):
        watched.step()
    assert (watched.budget_bytes, watched.num_changes) == (400 * MIB, 3)
    watched.step(RETRY_SECONDS)
    assert watched.budget_bytes == 300 * MIB
    refused, followed = caplog.messages
    assert refused.endswith("below the memory budget, which stays as it is: 12 beams")
    assert followed.endswith("the memory budget follows it, from 400.00 MiB")


@pytest.mark.parametrize(
    "error", [StorageError("gone"), OSError(5, "gone"), RuntimeError("gone"), MemoryError("gone")]
)
def test_a_run_goes_on_if_loading_by_a_smaller_limit_fails(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    watched = Watched()
    watched.errors = [error]
    watched.limit_bytes = 300 * MIB
    for _ in range(3):
        watched.step()
    assert (watched.budget_bytes, watched.num_changes) == (400 * MIB, 1), "loaded only once"
    (line,) = caplog.messages
    assert "below the memory budget, which stays as it is: " in line
    assert "gone" in line
    watched.limit_bytes = 350 * MIB
    watched.step()
    assert watched.budget_bytes == 350 * MIB


def test_beams_that_the_new_plan_has_no_memory_for_are_refused() -> None:
    def engine(*num_beams: int) -> Any:
        requests = [SimpleNamespace(params=SimpleNamespace(num_beams=n)) for n in num_beams]
        return SimpleNamespace(requests=requests)

    plan = SimpleNamespace(n_draft_tokens=8, budget_bytes=300 * MIB)
    planned: Any = SimpleNamespace(plan=plan, options=RunOptions("t", parallel=2))
    check_beams(engine(), planned)
    check_beams(engine(1, 11), planned)
    with pytest.raises(BeamsRunning, match="has 12 beams, and a memory budget of 300.00 MiB is"):
        check_beams(engine(1, 12), planned)
