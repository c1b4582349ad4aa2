"""Programs that never outlive the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup, tied_argv
from offload.process.limited import run_limited
from offload.units import MIB

ROOT = Path(__file__).resolve().parents[3]
# Report that it runs, and keep the pipe open for as long as it lives.
WAIT = "print('x', end='', flush=True); import time; time.sleep(600)"
TIED = f"""
import subprocess, sys
from offload.process.cgroup import tied_argv
subprocess.run(tied_argv([sys.executable, "-c", {WAIT!r}]))
"""
IN_CGROUP = f"""
import sys
from offload.process.limited import Limits, run_limited
run_limited([sys.executable, "-c", {WAIT!r}], Limits(100 << 20))
"""
AS_CHILD = """
from bench.process.child import run_child
run_child("waiting_module", [], None)
"""


def kill_parent_of(script: str) -> int:
    """Return the parent's id once the child is gone as well: its end of the pipe is closed."""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.read(1) == b"x"
    parent.kill()
    assert parent.communicate(timeout=30) == (b"", None)
    return parent.pid


def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    kill_parent_of(TIED)


def test_so_does_a_measuring_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waiting_module.py").write_text(WAIT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    kill_parent_of(AS_CHILD)


def test_an_enforced_child_and_its_cgroup_go() -> None:
    try:
        before = MemoryCgroup.create(64 * MIB)
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    before.remove()
    creator = kill_parent_of(IN_CGROUP)
    (stale,) = before.path.parent.glob(f"specdec-{creator}-*")  # its parent could not remove it
    deadline = time.monotonic() + 30
    while stale.exists() and time.monotonic() < deadline:  # it is busy until the child is reaped
        MemoryCgroup.create(64 * MIB).remove()
        time.sleep(0.01)
    assert not stale.exists()


def test_a_program_whose_parent_is_gone_already_is_not_started(tmp_path: Path) -> None:
    command = tied_argv(["/bin/touch", str(tmp_path / "ran")])
    not_our_id = str(int(command[4]) + 1)
    orphan = subprocess.run([*command[:4], not_our_id, *command[5:]], check=False)
    assert orphan.returncode == 137
    assert not (tmp_path / "ran").exists()


def test_the_program_has_its_own_arguments_and_signals() -> None:
    script = 'test "$1" = -- && test "$2" = "a b" && exit 7'
    assert run_limited(["/bin/sh", "-c", script, "sh", "--", "a b"]).code == 7
    for number in (signal.SIGPIPE, signal.SIGINT):  # neither ignored nor handled by Python
        killed = ["/bin/sh", "-c", f"kill -{int(number)} $$; exit 3"]
        assert run_limited(killed).code == 128 + number


def test_what_cannot_be_run_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_limited([str(tmp_path)]).code == 126
    assert run_limited([str(tmp_path / "none")]).code == 127
    missing = tmp_path / "no" / "cgroup.procs"
    lost = subprocess.run(tied_argv(["/bin/true"], [missing]), check=False)
    assert lost.returncode == 125
    denied, none, enter = capfd.readouterr().err.splitlines()
    assert denied == f"cannot run {tmp_path}: Permission denied"
    assert none == f"cannot run {tmp_path / 'none'}: No such file or directory"
    assert enter == f"cannot enter the cgroup {missing}: No such file or directory"
