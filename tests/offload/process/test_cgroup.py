"""Memory cgroups: real ones where that is allowed, simulated trees for the other version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offload.process import cgroup, cgroup_files
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup, run_in_cgroup
from offload.process.memory import memory_cgroups
from offload.units import MIB

ALLOCATE = "import sys; x = bytearray(int(sys.argv[1])); print(len(x)); sys.exit(7)"


def _why_not() -> str:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        return str(error)
    return ""


needs_cgroup = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "available")


# --- real ones ---------------------------------------------------------------------------------


@needs_cgroup
def test_a_program_within_the_limit_keeps_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    code = run_in_cgroup([sys.executable, "-c", ALLOCATE, str(20 * MIB)], 100 * MIB)
    captured = capfd.readouterr()
    assert code == 7
    assert captured.out.strip() == str(20 * MIB)
    assert captured.err == ""


@needs_cgroup
def test_a_program_beyond_the_limit_is_killed_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    code = run_in_cgroup([sys.executable, "-c", ALLOCATE, str(300 * MIB)], 100 * MIB)
    message = capfd.readouterr().err.strip()
    assert code == 137
    assert "killed by the kernel" in message
    assert "100.00 MiB" in message
    assert "\n" not in message


@needs_cgroup
def test_a_killed_program_is_called_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    argv = [sys.executable, "-c", ALLOCATE, str(300 * MIB)]
    assert run_in_cgroup(argv, 100 * MIB, name="specdec run") == 137
    assert capfd.readouterr().err.startswith("specdec run was killed by the kernel: it needed")


@needs_cgroup
def test_a_killed_grandchild_is_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {ALLOCATE!r}, '{300 * MIB}']); sys.exit(3)"
    )
    assert run_in_cgroup([sys.executable, "-c", script], 100 * MIB) == 3
    assert "a process started by" in capfd.readouterr().err


@needs_cgroup
def test_environment_and_a_program_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "SPECDEC_TEST": "42"}
    assert run_in_cgroup(["/bin/sh", "-c", "exit $SPECDEC_TEST"], 100 * MIB, env) == 42
    assert run_in_cgroup(["/nonexistent/program"], 100 * MIB) == 127
    capfd.readouterr()


@needs_cgroup
def test_figures_and_removal() -> None:
    before = _our_cgroups()
    with MemoryCgroup.create(100 * MIB) as group:
        argv = [sys.executable, "-c", "import sys; sys.stdin.read(); x = bytearray(30 << 20)"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        group.add(process.pid)
        process.communicate(b"")
        assert group.oom_kills == 0
        assert group.peak_bytes is None or 30 * MIB <= group.peak_bytes <= 100 * MIB
    assert not group.path.exists()
    group.remove()  # twice is allowed
    assert _our_cgroups() == before


@needs_cgroup
def test_signals_are_passed_on() -> None:
    # A process of its own, because pytest has the signal handlers here.
    script = (
        "import sys; from offload.process.cgroup import run_in_cgroup; "
        "child = 'import signal, sys; print(1, flush=True); signal.sigwait([signal.SIGTERM]); "
        "sys.exit(9)'; "
        "child = 'import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); ' "
        "+ child; "
        "sys.exit(run_in_cgroup([sys.executable, '-c', child], 100 << 20))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 9
    process.stdout.close()


@needs_cgroup
def test_a_signal_that_ends_the_program() -> None:
    assert run_in_cgroup(["/bin/sh", "-c", "kill -TERM $$"], 100 * MIB) == 128 + signal.SIGTERM


def _our_cgroups() -> list[Path]:
    group = MemoryCgroup.create(64 * MIB)
    group.remove()
    return sorted(group.path.parent.glob("specdec-*"))


# --- simulated ones ----------------------------------------------------------------------------


def _fake_v1(root: Path) -> Path:
    parent = root / "memory" / "job"
    parent.mkdir(parents=True)
    _fake_proc(root, f"1 1 0:1 / {root}/memory rw - cgroup cgroup rw,memory", "4:memory:/job\n0::/")
    return parent


def _fake_v2(root: Path) -> Path:
    own = root / "unified" / "user" / "app"
    own.mkdir(parents=True)
    for folder in (root / "unified", root / "unified/user", own):
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
        (folder / "cgroup.subtree_control").write_text("memory pids\n")
    (own / "cgroup.subtree_control").write_text("\n")
    _fake_proc(root, f"1 1 0:1 / {root}/unified rw - cgroup2 cgroup2 rw", "0::/user/app")
    return own


def _fake_proc(root: Path, mounts: str, cgroups: str) -> None:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "mountinfo").write_text(mounts + "\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroups + "\n")


def test_v1_writes_the_limit(tmp_path: Path) -> None:
    parent = _fake_v1(tmp_path)
    group = MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")
    assert group.path.parent == parent
    assert (group.path / "memory.limit_in_bytes").read_text() == f"{100 * MIB}\n"
    assert not (group.path / "memory.memsw.limit_in_bytes").exists()  # absent stays absent
    (group.path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (group.path / "memory.max_usage_in_bytes").write_text("12345\n")
    assert (group.oom_kills, group.peak_bytes) == (3, 12345)


def test_what_dead_processes_left_is_swept_away(tmp_path: Path) -> None:
    parent = _fake_v1(tmp_path)
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    stale, busy = parent / f"specdec-{ended.pid}-01234567", parent / f"specdec-{ended.pid}-89abcdef"
    ours, foreign = parent / f"specdec-{os.getpid()}-01234567", parent / "specdec-notes"
    for path in (stale, busy, ours, foreign):
        path.mkdir()
    (busy / "process").touch()  # cannot be removed, as a cgroup that holds one
    group = MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")
    assert set(parent.iterdir()) == {busy, ours, foreign, group.path}


def test_v2_uses_a_parent_that_hands_memory_down(tmp_path: Path) -> None:
    own = _fake_v2(tmp_path)
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()  # writing fails, as in a cgroup with processes
    group = MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")
    assert group.path.parent == own.parent
    assert (group.path / "memory.max").read_text() == f"{100 * MIB}\n"
    assert (group.oom_kills, group.peak_bytes) == (0, None)
    (group.path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    (group.path / "memory.peak").write_text("777\n")
    assert (group.oom_kills, group.peak_bytes) == (1, 777)


def test_v2_without_the_controller_is_named(tmp_path: Path) -> None:
    own = _fake_v2(tmp_path)
    for folder in (own, own.parent, own.parent.parent):
        (folder / "cgroup.controllers").write_text("cpu\n")
    with pytest.raises(CgroupUnavailable, match="controller is not enabled"):
        MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")


def test_no_hierarchy_is_named(tmp_path: Path) -> None:
    _fake_proc(tmp_path, "22 1 254:0 / / rw - ext4 /dev/vda rw", "0::/")
    with pytest.raises(CgroupUnavailable, match="no cgroup file system") as caught:
        MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_created_is_named(tmp_path: Path) -> None:
    parent = _fake_v1(tmp_path)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(path: Path, *args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CgroupUnavailable, match="Permission denied") as caught:
            MemoryCgroup.create(100 * MIB, proc=tmp_path / "proc")
    assert str(parent) in str(caught.value)


def test_without_cgroup_and_systemd_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "memory_cgroups", lambda *arguments: [])
    with pytest.raises(CgroupUnavailable, match="no cgroup file system"):
        run_in_cgroup(["/bin/touch", str(tmp_path / "ran")], 100 * MIB)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("works", [True, False])
def test_a_systemd_user_session_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    _fake_v2(tmp_path)
    locations = memory_cgroups(tmp_path / "proc")
    monkeypatch.setattr(cgroup, "memory_cgroups", lambda *arguments: locations)
    monkeypatch.setattr(cgroup_files, "_hands_memory_down", lambda directory: False)
    fake = tmp_path / "bin" / "systemd-run"
    fake.parent.mkdir()
    run = 'echo "$@" >> log; while [ "$1" != -- ] && [ "$1" != true ]; do shift; done; '
    run += '[ "$1" = true ] || { shift; exec "$@"; }'
    fake.write_text(f"#!/bin/sh\n{run if works else 'exit 1'}\n")
    fake.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    if not works:
        with pytest.raises(CgroupUnavailable):
            run_in_cgroup(["/bin/sh", "-c", "exit 5"], 100 * MIB)
        return
    assert run_in_cgroup(["/bin/sh", "-c", "exit 5"], 100 * MIB) == 5
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("--user --scope --quiet -p MemoryMax=104857600 -p MemorySwapMax=0 -- ")


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        MemoryCgroup.create(limit)
