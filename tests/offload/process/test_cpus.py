"""A CPU quota counts as that many processors; trees are simulated, except for the last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.process import cpus
from offload.process.cgroup_files import (
    CgroupUnavailable,
    make_cgroup,
    remove_cgroup,
    write_cgroup,
)
from offload.process.cpus import CpuMonitor, thread_counts, threads_for_load, usable_cpus
from offload.process.memory import controller_cgroups


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def machine(root: Path, version: int, files: dict[str, str]) -> Path:
    """Simulate /proc of a process in the cgroup /job/inner; `files` are below the mount."""
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


class Machine:
    """Four processors, their clock, and the load of other programs."""

    def __init__(self, usable: int = 4) -> None:
        self.seconds, self.seconds_of_other_processes, self.usable = 0.0, 100.0, usable
        self.monitor = CpuMonitor(
            lambda: self.usable, 4, lambda: self.seconds_of_other_processes, lambda: self.seconds
        )

    def n_cpus_after(self, seconds: float, n_busy: float) -> int:
        self.seconds += seconds
        self.seconds_of_other_processes += n_busy * seconds
        return self.monitor.n_cpus()


def test_processors_that_others_compute_on_are_not_free() -> None:
    machine = Machine()
    assert machine.n_cpus_after(1.0, 0.0) == 4
    assert machine.n_cpus_after(1.0, 1.2) == 3
    assert machine.n_cpus_after(1.0, 3.9) == 1  # at least one
    assert machine.n_cpus_after(1.0, 0.4) == 4  # noticed again


def test_no_more_than_the_process_may_use() -> None:
    machine = Machine(usable=2)
    assert machine.n_cpus_after(1.0, 1.0) == 2
    machine.usable = 1  # a quota set later
    assert machine.n_cpus_after(1.0, 0.0) == 1


def test_a_moment_tells_nothing() -> None:
    machine = Machine()
    assert machine.n_cpus_after(0.1, 4.0) == 4
    assert machine.n_cpus_after(0.9, 4.0) == 1  # the load at that moment counts then


@pytest.mark.parametrize(
    ("max_threads", "expected"), [(1, (1,)), (2, (2, 1)), (3, (3, 2, 1)), (16, (16, 12, 8, 4, 1))]
)
def test_few_numbers_of_threads(max_threads: int, expected: tuple[int, ...]) -> None:
    assert thread_counts(max_threads) == expected


@pytest.mark.parametrize(("n_free", "expected"), [(20, 16), (13, 12), (3, 1), (1, 1)])
def test_threads_fit_the_free_processors(
    n_free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "free_cpus", lambda: n_free)
    assert threads_for_load(16) == expected
