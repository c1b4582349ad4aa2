"""A quota of processor time counts as so many processors; trees are simulated, but for the last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.process.cgroup_files import (
    CgroupUnavailable,
    make_cgroup,
    remove_cgroup,
    write_cgroup,
)
from offload.process.cpus import usable_cpus
from offload.process.memory import controller_cgroups


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def machine(root: Path, version: int, files: dict[str, str]) -> Path:
    """A /proc of a process in the cgroup /job/inner; `files` are below the mount."""
    mount = root / "cgroups"
    kind = "cgroup cgroup rw,cpu,cpuacct" if version == 1 else "cgroup2 cgroup2 rw"
    entry = "4:cpu,cpuacct:/job/inner" if version == 1 else "0::/job/inner"
    (root / "self").mkdir()
    (root / "self" / "mountinfo").write_text(f"31 23 0:29 / {mount} rw - {kind}\n")
    (root / "self" / "cgroup").write_text(f"{entry}\n")
    (mount / "job" / "inner").mkdir(parents=True)
    for name, text in files.items():
        (mount / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("own", "parents", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("200000 100000", "max 100000", 2),
        ("250000 100000", "max 100000", 3),
        ("10000 100000", "max 100000", 1),
        ("max 100000", "150000 50000", 3),
        ("400000 100000", "200000 100000", 2),
        ("1600000 100000", "max 100000", 8),
        ("nonsense", "0 0", 1),
    ],
)
def test_version_2(tmp_path: Path, own: str, parents: str, expected: int) -> None:
    files = {"job/inner/cpu.max": own, "job/cpu.max": parents}
    assert usable_cpus(machine(tmp_path, 2, files)) == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"), [("-1", "100000", 8), ("350000", "100000", 4)]
)
def test_version_1(tmp_path: Path, quota: str, period: str, expected: int) -> None:
    files = {"job/cpu.cfs_quota_us": quota, "job/cpu.cfs_period_us": period}
    assert usable_cpus(machine(tmp_path, 1, files)) == expected


def test_without_cgroups(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 8


PROGRAM = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
from offload.process.cpus import usable_cpus
print(usable_cpus())
"""


def test_a_quota_that_is_in_force() -> None:
    for location in controller_cgroups("cpu"):
        if location.version == 1 and (location.directory / "cpu.cfs_quota_us").exists():
            break
    else:
        pytest.skip("no cgroup of version 1 with quotas")
    try:
        group = make_cgroup(location.directory)
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    try:
        write_cgroup(group / "cpu.cfs_quota_us", 100_000)
        write_cgroup(group / "cpu.cfs_period_us", 100_000)
        command = [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs")]
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"1\n"
    finally:
        remove_cgroup(group)
