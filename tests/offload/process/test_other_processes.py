"""CPU use by other programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator

import psutil
import pytest

from offload.process import other_processes
from offload.process.other_processes import beside_other_processes

COUNT = other_processes.seconds_of_other_processes  # tests get a fresh one


@pytest.fixture
def busy_program() -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    program.kill()
    program.wait()


def test_a_program_that_computes_is_seen(
    busy_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", COUNT)
    monkeypatch.setattr(other_processes, "MAX_SHARE", 0.1 / (psutil.cpu_count() or 1))
    with beside_other_processes() as actual:
        time.sleep(1.0)
    assert actual.are_busy


def test_seconds_of_others_are_those_of_the_machine_without_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {"user": 100.0, "nice": 20.0, "system": 50.0, "steal": 3.0, "idle": 1000.0}
    names = "user nice system idle steal"
    machine = namedtuple("Times", names)
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine(**fields))
    own = psutil.Process().cpu_times().user
    assert COUNT() == pytest.approx(123.0 - own, abs=5.0)


@pytest.mark.parametrize(("seconds", "are_busy"), [(0.0, False), (1e3, True), (-1e3, False)])
def test_others_are_busy_from_a_tenth_of_the_processors_on(
    monkeypatch: pytest.MonkeyPatch, seconds: float, are_busy: bool
) -> None:
    counted = iter((0.0, seconds))
    monkeypatch.setattr(other_processes, "seconds_of_other_processes", lambda: next(counted))
    with beside_other_processes() as actual:
        pass
    assert actual.are_busy == are_busy
