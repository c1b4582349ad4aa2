"""Memory cgroups: real ones where permitted, simulated trees for the other version."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.units import MIB


def _why_not() -> str:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        return str(error)
    return ""


needs_cgroup = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "available")


# --- real cgroups ---------------------------------------------------------------------------------


@needs_cgroup
def test_metrics_and_removal() -> None:
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


def _our_cgroups() -> list[Path]:
    group = MemoryCgroup.create(64 * MIB)
    group.remove()
    return sorted(group.path.parent.glob("specdec-*"))


# --- simulated cgroups ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("n_bytes", [2**63, 2**64, 2**70])
def test_a_limit_beyond_all_memory_is_none(tmp_path: Path, n_bytes: int) -> None:
    """The kernel wraps at 2**64: that limit would be 0, and kill everything inside."""
    _fake_v1(tmp_path)
    group = MemoryCgroup.create(n_bytes, proc=tmp_path / "proc")
    assert (group.path / "memory.limit_in_bytes").read_text() == f"{2**63 - mmap.PAGESIZE}\n"


def test_what_dead_processes_left_is_swept_away(tmp_path: Path) -> None:
    parent = _fake_v1(tmp_path)
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    stale, busy = parent / f"specdec-{ended.pid}-01234567", parent / f"specdec-{ended.pid}-89abcdef"
    ours, foreign = parent / f"specdec-{os.getpid()}-01234567", parent / "specdec-notes"
    for path in (stale, busy, ours, foreign):
        path.mkdir()
    (busy / "process").touch()  # cannot be removed, as a cgroup with a child
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


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        MemoryCgroup.create(limit)
