"""Read limits: real ones where permitted, simulated trees for the rest."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.process.limited import OK, Limits, run_limited
from offload.ring import bandwidth as profile
from offload.ring.bandwidth import measure_storage
from offload.ring.streamer import StreamStats
from offload.storage import read_limit as throttle
from offload.storage.read_limit import ReadLimit, block_device, read_limit_in_force
from offload.units import MIB

ROOT = Path(__file__).parents[3]
TELL = (
    "import sys; from pathlib import Path; "
    "from offload.storage.read_limit import read_limit_in_force; "
    "print(read_limit_in_force(Path(sys.argv[1])))"
)


def _why_not() -> str:
    try:
        with (
            MemoryCgroup.create(64 * MIB) as group,
            ReadLimit(Path(__file__), 10**9).applied(group),
        ):
            return ""
    except CgroupUnavailable as error:
        return str(error)


needs_throttle = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "available")


# --- real limits ----------------------------------------------------------------------------------


@needs_throttle
def test_a_program_runs_under_the_limit_and_knows_it(capfd: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__)
    reads = ReadLimit(here, 123 * MIB)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", TELL, str(here)]
    assert run_limited(argv, Limits(200 * MIB, reads=reads), env).exit == OK
    assert capfd.readouterr().out.strip() == str(123 * MIB)
    assert read_limit_in_force(here) != 123 * MIB  # this process is unlimited again


@needs_throttle
def test_the_limit_goes_with_the_program() -> None:
    with MemoryCgroup.create(64 * MIB) as group:
        with ReadLimit(Path(__file__), MIB).applied(group) as more:
            assert all(path.exists() for path in more)
        assert not any(path.exists() for path in more)
    assert not group.path.exists()


# --- simulated limits -----------------------------------------------------------------------------

DEVICE = block_device(Path(__file__))
needs_device = pytest.mark.skipif(DEVICE is None, reason="the tests are on no block device")


def _proc(root: Path, mounts: str, cgroups: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "mountinfo").write_text(mounts + "\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroups + "\n")
    return root / "proc"


def _v1(root: Path) -> tuple[Path, Path]:
    own = root / "blkio" / "job"
    own.mkdir(parents=True)
    mounts = f"1 1 0:1 / {root}/blkio rw - cgroup cgroup rw,blkio"
    return own, _proc(root, mounts, "7:blkio:/job\n0::/")


def _v2(root: Path) -> tuple[Path, Path]:
    own = root / "unified" / "user" / "app"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("memory\n")
    mounts = f"1 1 0:1 / {root}/unified rw - cgroup2 cgroup2 rw"
    return own, _proc(root, mounts, "0::/user/app")


@needs_device
def test_v1_has_a_cgroup_for_it(tmp_path: Path) -> None:
    own, proc = _v1(tmp_path)
    with ReadLimit(Path(__file__), 5000).applied(MemoryCgroup(own, 1, MIB), proc=proc) as more:
        (procs,) = more
        assert procs.parent.parent == own
        written = (procs.parent / "blkio.throttle.read_bps_device").read_text()
    assert written == f"{DEVICE} 5000\n"


@needs_device
def test_v2_limits_the_same_cgroup(tmp_path: Path) -> None:
    own, proc = _v2(tmp_path)
    group = MemoryCgroup(own / "specdec", 2, MIB)
    group.path.mkdir()
    with ReadLimit(Path(__file__), 5000).applied(group, proc=proc) as more:
        assert list(more) == []
    assert (group.path / "io.max").read_text() == f"{DEVICE} rbps=5000\n"
    assert (own / "cgroup.subtree_control").read_text() == "+io\n"


@needs_device
def test_the_limit_in_force_is_the_lowest_that_holds_this_process(tmp_path: Path) -> None:
    own, proc = _v2(tmp_path)
    assert read_limit_in_force(Path(__file__), proc) is None
    (own / "io.max").write_text(f"9:9 rbps=1 wbps=1\n{DEVICE} rbps=7000 wbps=max\n")
    assert read_limit_in_force(Path(__file__), proc) == 7000
    (own.parent / "io.max").write_text(f"{DEVICE} wbps=5 rbps=6000\n")
    assert read_limit_in_force(Path(__file__), proc) == 6000
    (own.parent / "io.max").write_text(f"{DEVICE} rbps=max wbps=5\n")
    assert read_limit_in_force(Path(__file__), proc) == 7000


@needs_device
def test_v1_looks_at_its_own_cgroup_only(tmp_path: Path) -> None:
    own, proc = _v1(tmp_path)
    (own.parent / "blkio.throttle.read_bps_device").write_text(f"{DEVICE} 1\n")
    assert read_limit_in_force(Path(__file__), proc) is None
    (own / "blkio.throttle.read_bps_device").write_text(f"{DEVICE} 7000\n")
    assert read_limit_in_force(Path(__file__), proc) == 7000


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = _proc(tmp_path, "22 1 254:0 / / rw - ext4 /dev/vda rw", "0::/")
    group = MemoryCgroup(tmp_path, 1, MIB)
    monkeypatch.setattr(throttle, "block_device", lambda path: "8:0")
    with (
        pytest.raises(CgroupUnavailable, match="no cgroup has the controller"),
        ReadLimit(tmp_path, 5).applied(group, proc=proc),
    ):
        pass
    monkeypatch.setattr(throttle, "block_device", lambda path: None)
    with (
        pytest.raises(CgroupUnavailable, match="no block device"),
        ReadLimit(tmp_path, 5).applied(group, proc=proc),
    ):
        pass


def test_the_disk_of_a_partition(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    disk = tmp_path / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / name).symlink_to(disk / "sda1")
    has_device = os.major(number) != 0
    assert block_device(tmp_path, tmp_path) == (name if has_device else None)
    (disk / "sda1" / "partition").write_text("1\n")
    assert block_device(tmp_path, tmp_path) == ("8:0" if has_device else None)


@pytest.mark.parametrize("bps", [0, -1])
def test_a_limit_is_positive(bps: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        ReadLimit(Path("x"), bps)


def test_a_measurement_under_a_limit_neither_writes_nor_reads_the_disk_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"x" * MIB)
    seconds = iter((1.0, 4.0, 8.0))
    monkeypatch.setattr(
        profile, "_stream", lambda *_: StreamStats(bytes_read=800, read_seconds=next(seconds))
    )
    monkeypatch.setattr(profile, "_MIN_BYTES", 1)

    def speed() -> float:
        actual = measure_storage(weights, cache_dir=tmp_path / "cache")
        return actual.storage_bytes_per_second

    assert speed() == 800
    monkeypatch.setattr(profile, "read_limit_in_force", lambda path: 200)
    assert speed() == 200
    assert speed() == 100
    monkeypatch.setattr(profile, "read_limit_in_force", lambda path: None)
    assert speed() == 800


def test_a_hidden_sys_is_no_block_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end a run in some containers."""

    def refuse(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert block_device(tmp_path) is None
    assert read_limit_in_force(tmp_path) is None
