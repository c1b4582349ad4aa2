"""The smallest limit among the process's own cgroups counts; trees are simulated."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from offload.process.memory import memory_cgroups, memory_limit, process_memory, reset_peak_rss
from offload.units import GIB, MIB

NO_LIMIT_V1 = "9223372036854771712"


class Machine:
    """A fake /proc and cgroup mounts under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 5 kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mount(self, *, v1: str | None = None, v2: str | None = None) -> None:
        """Mount the version 1 memory and/or the version 2 hierarchy, shown from these roots on."""
        lines = ["22 1 254:0 / / rw - ext4 /dev/vda rw", "23 1 0:5 / /proc rw - proc proc rw",
                 f"30 23 0:28 / {self.root}/cg/cpu rw shared:9 - cgroup cgroup rw,cpu"]  # fmt: skip
        if v1 is not None:
            lines.append(f"31 23 0:29 {v1} {self.root}/cg/memory rw - cgroup cgroup rw,memory")
        if v2 is not None:
            lines.append(f"32 23 0:30 {v2} {self.root}/cg/unified rw - cgroup2 cgroup2 rw")
        self.write("proc/self/mountinfo", "\n".join(lines))

    def cgroup(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_v1_the_parent_may_be_the_tighter_one(machine: Machine) -> None:
    machine.mount(v1="/")
    machine.cgroup("5:cpu:/elsewhere", "4:memory:/jobs/one", "0::/")
    machine.write("cg/memory/memory.limit_in_bytes", NO_LIMIT_V1)
    machine.write("cg/memory/jobs/memory.limit_in_bytes", 3 * GIB)
    machine.write("cg/memory/jobs/one/memory.limit_in_bytes", 4 * GIB)
    limit = memory_limit(machine.proc)
    assert limit.n_bytes == 3 * GIB
    assert limit.source == f"cgroup v1 {machine.root}/cg/memory/jobs"


def test_v1_limit_with_swap_and_of_hidden_parents_count(machine: Machine) -> None:
    machine.mount(v1="/docker/abc")  # a container that sees only its own part
    machine.cgroup("4:memory:/docker/abc")
    machine.write("cg/memory/memory.limit_in_bytes", 8 * GIB)
    machine.write("cg/memory/memory.memsw.limit_in_bytes", 7 * GIB)
    assert memory_limit(machine.proc).n_bytes == 7 * GIB
    machine.write(
        "cg/memory/memory.stat",
        f"cache 12\nhierarchical_memory_limit {5 * GIB}\nhierarchical_memsw_limit {NO_LIMIT_V1}",
    )
    assert memory_limit(machine.proc).n_bytes == 5 * GIB


@pytest.mark.parametrize("path", ["/docker/abc/below", "/../other", "/gone"])
def test_v1_container_whose_path_cannot_be_found_uses_the_mount(
    machine: Machine, path: str
) -> None:
    machine.mount(v1="/docker/abc")
    machine.cgroup(f"4:memory:{path}")
    machine.write("cg/memory/memory.limit_in_bytes", 2 * GIB)
    assert memory_limit(machine.proc).n_bytes == 2 * GIB


def test_v2_max_high_and_no_limit(machine: Machine) -> None:
    machine.mount(v2="/")
    machine.cgroup("0::/user.slice/app.scope")
    machine.write("cg/unified/user.slice/memory.max", "max")
    machine.write("cg/unified/user.slice/app.scope/memory.max", "max")
    assert memory_limit(machine.proc).source == "machine"
    machine.write("cg/unified/user.slice/memory.max", 6 * GIB)
    machine.write("cg/unified/user.slice/app.scope/memory.high", 5 * GIB)
    limit = memory_limit(machine.proc)
    assert limit.n_bytes == 5 * GIB
    assert limit.source == f"cgroup v2 {machine.root}/cg/unified/user.slice/app.scope"


def test_a_limit_above_the_machines_memory_is_none(machine: Machine) -> None:
    machine.mount(v2="/")
    machine.cgroup("0::/")
    machine.write("cg/unified/memory.max", 100 * GIB)
    limit = memory_limit(machine.proc)
    assert (limit.n_bytes, limit.source) == (16 * GIB, "machine")


def test_both_versions_mounted(machine: Machine) -> None:
    machine.mount(v1="/", v2="/")
    machine.cgroup("4:memory:/a", "3:cpu,cpuacct:/a", "1:name=systemd:/a", "0::/b")
    machine.write("cg/memory/a/memory.limit_in_bytes", 3 * GIB)
    machine.write("cg/unified/b/memory.max", 2 * GIB)
    assert memory_limit(machine.proc).n_bytes == 2 * GIB
    assert [location.version for location in memory_cgroups(machine.proc)] == [1, 2]


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(
        "proc/self/mountinfo",
        f"31 23 0:29 / {tmp_path}/my\\040cg rw - cgroup2 cgroup2 rw",
    )
    machine.cgroup("0::/")
    machine.write("my cg/memory.max", GIB)
    assert memory_limit(machine.proc).n_bytes == GIB


def test_garbage_is_no_limit(machine: Machine) -> None:
    machine.mount(v1="/", v2="/")
    machine.cgroup("nonsense", "4:memory", "", "0::/b", "4:memory:/")
    machine.write("cg/unified/b/memory.max", "lots")
    machine.write("cg/memory/memory.limit_in_bytes", "-1")
    assert memory_limit(machine.proc).source == "machine"


def test_no_proc_at_all_falls_back_to_psutil(tmp_path: Path) -> None:
    limit = memory_limit(tmp_path / "none")
    assert limit.source == "machine"
    assert limit.n_bytes > 64 * MIB
    assert process_memory(tmp_path / "none").rss_bytes > MIB


def test_process_memory_sees_anonymous_memory() -> None:
    before = process_memory()
    # A mapping of its own: malloc may return pages that the process already has.
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        np.frombuffer(block, dtype=np.uint8)[:] = 1
        after = process_memory()
    assert after.anonymous_bytes - before.anonymous_bytes > 60 * MIB
    assert after.peak_rss_bytes >= after.rss_bytes >= after.anonymous_bytes


def test_process_memory_parses_status(tmp_path: Path) -> None:
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    status.write_text(
        "Name:\tx: VmRSS\nVmHWM:\t    9 kB\nVmRSS:\t    7 kB\nRssAnon:\t 5 kB\nVmSwap:\t 3 kB\n"
    )
    memory = process_memory(tmp_path)
    assert memory.rss_bytes == 7 * 1024
    assert memory.anonymous_bytes == 5 * 1024
    assert memory.swap_bytes == 3 * 1024
    assert memory.peak_rss_bytes == 9 * 1024


def test_the_peak_can_be_reset() -> None:
    mapped = mmap.mmap(-1, 64 * MIB)
    mapped.write(b"x" * (64 * MIB))
    high = process_memory().peak_rss_bytes
    mapped.close()
    if not reset_peak_rss():
        pytest.skip("this system cannot reset the peak")
    assert process_memory().peak_rss_bytes < high - 32 * MIB
