"""Processes inside limits: their exit, and their usage."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.process.limited import FAILED, OK, OOM_KILLED, TIMED_OUT, Limits, Outcome, run_limited
from offload.process.memory import CgroupLocation
from offload.storage.read_limit import ReadLimit
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
    for seconds in (1.5, 6.0, 24.0):  # an emulated interpreter takes seconds to start
        assert run(tmp_path, script, seconds=seconds).exit == TIMED_OUT
        if (tmp_path / "log").read_text():
            break
    child = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_nothing_outlives_a_terminated_benchmark(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; "
        "from offload.process.limited import Limits, run_limited; "
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
def test_the_kernels_kill_is_distinguished_from_others(tmp_path: Path) -> None:
    outcome = run(tmp_path, "x = bytearray(300 << 20)", limit=100 * MIB)
    assert (outcome.exit, outcome.code, outcome.oom_kills) == (OOM_KILLED, 137, 1)
    assert outcome.cgroup_peak_bytes is not None
    assert outcome.cgroup_peak_bytes <= 100 * MIB
    outcome = run(tmp_path, "import os; os.kill(os.getpid(), 9)", limit=100 * MIB)
    assert outcome.exit == FAILED


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


@needs_cgroup
def test_a_killed_child_of_a_program_is_counted(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; "
        "subprocess.run([sys.executable, '-c', 'x = bytearray(300 << 20)']); sys.exit(3)"
    )
    outcome = run(tmp_path, script, limit=100 * MIB)
    assert (outcome.exit, outcome.code, outcome.oom_kills) == (OOM_KILLED, 3, 1)


@needs_cgroup
def test_without_a_log_the_terminal_is_shared(capfd: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "SPECDEC_TEST": "42"}
    argv = ["/bin/sh", "-c", "echo said; exit $SPECDEC_TEST"]
    assert run_limited(argv, Limits(100 * MIB), env).code == 42
    assert capfd.readouterr() == ("said\n", "")
    assert run_limited(["/nonexistent/program"], Limits(100 * MIB)).code == 127
    capfd.readouterr()


@needs_cgroup
def test_without_a_log_signals_are_passed_on() -> None:
    # A subprocess, because pytest owns the signal handlers here.
    script = (
        "import sys; from offload.process.limited import Limits, run_limited; "
        "child = 'import signal, sys; print(1, flush=True); signal.sigwait([signal.SIGTERM]); "
        "sys.exit(9)'; "
        "child = 'import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); ' "
        "+ child; "
        "sys.exit(run_limited([sys.executable, '-c', child], Limits(100 << 20)).code)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 9
    process.stdout.close()


def test_a_signal_that_comes_while_it_is_started_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = subprocess.Popen

    def interrupted_start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", interrupted_start)
    assert run_limited(["/bin/sleep", "20"]).code == 128 + signal.SIGTERM


def test_ctrl_c_comes_once_wherever_standard_input_is() -> None:
    """The terminal sends it to the program itself."""
    count = (
        "import signal, time; n = []; signal.signal(signal.SIGINT, lambda *_: n.append(1)); "
        "print('ready', flush=True); end = time.monotonic() + 20; "
        "exec('while not n and time.monotonic() < end: time.sleep(0.01)'); "
        "time.sleep(0.5); print(len(n), flush=True)"
    )
    script = (
        "import os, sys; os.setsid(); os.open(sys.argv[1], os.O_RDWR); "  # our terminal from now on
        "from offload.process.limited import run_limited; "
        f"run_limited([sys.executable, '-c', {count!r}])"
    )
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, os.ttyname(other_end)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    os.write(terminal, b"\x03")
    assert process.communicate(timeout=60)[0] == b"1\n"
    os.close(terminal)
    os.close(other_end)


@needs_cgroup
def test_nothing_is_left_in_the_cgroup(tmp_path: Path) -> None:
    """Even a process with its own session is killed."""
    script = (
        "import subprocess, sys; child = subprocess.Popen("
        "[sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
        "print(child.pid, flush=True)"
    )
    assert run(tmp_path, script, limit=200 * MIB).exit == OK
    assert not _runs(int((tmp_path / "log").read_text()))


def test_without_cgroup_and_systemd_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.process.cgroup.memory_cgroups", lambda *arguments: [])
    monkeypatch.setattr("offload.process.limited.memory_cgroups", lambda *arguments: [])
    with pytest.raises(CgroupUnavailable, match="no cgroup file system"):
        run_limited(["/bin/touch", str(tmp_path / "ran")], Limits(100 * MIB))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("works", [True, False])
def test_a_systemd_user_session_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    location = CgroupLocation(2, tmp_path, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")

    def refuse(limit_bytes: int) -> MemoryCgroup:
        raise CgroupUnavailable("no rights")

    monkeypatch.setattr(MemoryCgroup, "create", refuse)
    monkeypatch.setattr("offload.process.limited.memory_cgroups", lambda: [location])
    fake = tmp_path / "bin" / "systemd-run"
    fake.parent.mkdir()
    script = 'echo "$@" >> log; while [ "$1" != -- ] && [ "$1" != true ]; do shift; done; '
    script += '[ "$1" = true ] || { shift; exec "$@"; }'
    fake.write_text(f"#!/bin/sh\n{script if works else 'exit 1'}\n")
    fake.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    command, limits = ["/bin/sh", "-c", "exit 5"], Limits(100 * MIB)
    if not works:
        with pytest.raises(CgroupUnavailable, match="no rights"):
            run_limited(command, limits)
        return
    with pytest.raises(CgroupUnavailable, match="no rights"):  # without the ability to limit reads
        run_limited(command, Limits(100 * MIB, reads=ReadLimit(tmp_path, 90_000_000)))
    assert run_limited(command, limits).code == 5
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("--user --scope --quiet -p MemoryMax=104857600 -p MemorySwapMax=0 -- ")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
