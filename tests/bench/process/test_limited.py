"""Processes inside limits: how they end, and what they took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.process.limited import FAILED, OK, OOM_KILLED, TIMED_OUT, Limits, Outcome, run_limited
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.storage.read_limit import ReadLimit, block_device
from offload.units import MIB

ROOT = Path(__file__).resolve().parents[3]


def _why_not() -> str:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        return str(error)
    return ""


needs_cgroup = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "available")


def run(tmp_path: Path, script: str, *, seconds: float = 20.0, limit: int | None = None) -> Outcome:
    argv = [sys.executable, "-c", script]
    return run_limited(argv, Limits(limit, seconds), os.environ, tmp_path / "log")


def test_a_program_that_ends_well(tmp_path: Path) -> None:
    script = "import time; x = bytearray(60 << 20); time.sleep(0.3); print('said')"
    outcome = run(tmp_path, script)
    assert (outcome.exit, outcome.code, outcome.cgroup_peak_bytes) == (OK, 0, None)
    assert 60 * MIB < outcome.peak_anonymous_bytes < 200 * MIB
    assert (tmp_path / "log").read_text() == "said\n"


def test_exit_codes_and_signals_are_failures(tmp_path: Path) -> None:
    assert run(tmp_path, "raise SystemExit(3)").code == 3
    outcome = run(tmp_path, "import os; os.kill(os.getpid(), 11)")
    assert (outcome.exit, outcome.code) == (FAILED, 128 + 11)


def test_a_late_program_and_its_children_are_killed(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    outcome = run(tmp_path, script, seconds=1.5)
    assert outcome.exit == TIMED_OUT
    child = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_nothing_outlives_a_terminated_benchmark(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; "
        "from bench.process.limited import Limits, run_limited; "
        "argv = [sys.executable, '-c', "
        "'import os, time; print(os.getpid(), flush=True); time.sleep(60)']; "
        f"run_limited(argv, Limits(None, 60.0), os.environ, Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    deadline = time.monotonic() + 30
    log = tmp_path / "log"
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 128 + 15
    assert not _runs(int(log.read_text()))


@needs_cgroup
def test_the_kernels_kill_is_told_from_others(tmp_path: Path) -> None:
    outcome = run(tmp_path, "x = bytearray(300 << 20)", limit=100 * MIB)
    assert (outcome.exit, outcome.code) == (OOM_KILLED, 137)
    assert outcome.cgroup_peak_bytes is not None
    assert outcome.cgroup_peak_bytes <= 100 * MIB
    outcome = run(tmp_path, "import os; os.kill(os.getpid(), 9)", limit=100 * MIB)
    assert outcome.exit == FAILED


@needs_cgroup
def test_reads_are_held_to_a_speed(tmp_path: Path) -> None:
    if block_device(tmp_path) is None:
        pytest.skip("no block device below the temporary folder")
    script = (
        "from pathlib import Path; from offload.storage.read_limit import read_limit_in_force; "
        f"print(read_limit_in_force(Path({str(tmp_path)!r})))"
    )
    limits = Limits(400 * MIB, 30.0, ReadLimit(tmp_path, 90_000_000))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert run_limited([sys.executable, "-c", script], limits, env, tmp_path / "log").exit == OK
    assert (tmp_path / "log").read_text() == "90000000\n"


@needs_cgroup
def test_page_cache_is_no_anonymous_memory(tmp_path: Path) -> None:
    script = (
        f"import os, time; p = {str(tmp_path / 'file')!r}; "
        "f = open(p, 'wb'); [f.write(bytes(1 << 20)) for _ in range(50)]; f.close(); "
        "open(p, 'rb').read(1); time.sleep(0.3)"
    )
    outcome = run(tmp_path, script, limit=200 * MIB)
    assert outcome.exit == OK
    assert outcome.cgroup_peak_bytes is not None
    assert outcome.peak_anonymous_bytes < 40 * MIB < outcome.cgroup_peak_bytes


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
