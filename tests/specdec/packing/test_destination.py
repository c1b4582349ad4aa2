"""The destination of a copy: no partial output stays, whatever ends it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_models import save_packable

from backends.packed.errors import PackError
from offload.errors import SpecdecError
from specdec.packing import pack as packing
from specdec.packing.pack import pack

ROOT = Path(__file__).resolve().parents[3]


def test_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PackError, match="1.00 MiB free: free some space"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_space_is_checked_where_a_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's own disk is full; the target has space for the weights, but not for all files."""
    plain = save_packable("llama", tmp_path / "plain")
    (tmp_path / "there" / "disk").mkdir(parents=True)
    (tmp_path / "packed").symlink_to(tmp_path / "there" / "disk")
    usage = shutil.disk_usage(tmp_path)

    def free(path: Path) -> Any:
        return usage._replace(free=20 << 20 if Path(path).name == "there" else 0)

    monkeypatch.setattr(packing.shutil, "disk_usage", free)
    with (plain / "LICENSE").open("wb") as file:
        file.truncate(8 << 20)
    with pytest.raises(PackError, match="there has 20.00 MiB free: free some space"):
        pack(plain, tmp_path / "packed")
    (plain / "LICENSE").unlink()
    pack(plain, tmp_path / "packed")
    assert (tmp_path / "there" / "disk" / "config.json").is_file()


def test_a_copy_that_cannot_be_opened_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.packed import writer

    plain = save_packable("llama", tmp_path / "plain")
    make = writer._header
    monkeypatch.setattr(writer, "_header", lambda *args: make(*args).replace(b"U8", b"I8"))
    with pytest.raises(SpecdecError, match="is stored as I8"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_every_file_and_folder_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    synced, sync = set(), os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = pack(plain, tmp_path / "packed").path
    assert {item.stat().st_ino for item in (*path.iterdir(), path, tmp_path)} <= synced


def test_folders_made_for_it_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing folders stay, with their content."""
    plain = save_packable("llama", tmp_path / "plain")
    (tmp_path / "mine").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_write_weights", full)
        with pytest.raises(PackError, match=r"cannot write .*: No space left on device"):
            pack(plain, tmp_path / "mine" / "a" / "b" / "packed")
    assert list((tmp_path / "mine").iterdir()) == []
    pack(plain, tmp_path / "mine" / "a" / "b" / "packed")
    assert (tmp_path / "mine" / "a" / "b" / "packed" / "config.json").is_file()


def folders_that_cannot_be(tmp_path: Path) -> dict[str, Path]:
    """Invalid folders, by their messages."""
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    return {
        "file is there already": tmp_path / "file",
        "file is a file: name a folder elsewhere": tmp_path / "file" / "a" / "packed",
        "nowhere is a link that leads nowhere": tmp_path / "nowhere",
        "cannot write .*circle": tmp_path / "circle",
        "plain is there already": tmp_path / "plain",
        "packed lies in the model's own folder": tmp_path / "plain" / "a" / "packed",
        "/proc/packed": Path("/proc/packed"),
        "File name too long": tmp_path / ("x" * 300),
        "cannot write ~nobody-has-this-name": Path("~nobody-has-this-name"),
    }


@pytest.mark.parametrize("n", range(9))
def test_where_it_cannot_go_is_found_before_reading(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.hf import loading

    plain = save_packable("llama", tmp_path / "plain")
    match, out = list(folders_that_cannot_be(tmp_path).items())[n]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(loading, "load_hf_model", lambda _: pytest.fail("it was read"))
    with pytest.raises(PackError, match=match):
        pack(plain, out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mounted_file_system_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(PackError, match="is where a file system is mounted: name a folder in it"):
        pack(tmp_path / "plain", tmp_path / "disk")


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "packed").symlink_to(tmp_path / "disk")
    report = pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    assert report.path == tmp_path / "packed"
    assert (tmp_path / "packed").is_symlink()
    assert (tmp_path / "disk" / "config.json").is_file()


def test_a_difference_after_packing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    from backends.packed import writer

    write = writer._write_at

    def broken(descriptor: int, data: np.ndarray, offset: int) -> None:
        write(descriptor, data ^ 1 if len(data) == 8192 else data, offset)

    monkeypatch.setattr(writer, "_write_at", broken)
    with pytest.raises(PackError, match="does not come back as it was"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}
    assert not pack(plain, tmp_path / "packed", verify=False).is_verified


@pytest.mark.slow
def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    out = tmp_path / "packed"
    # The first compared tensor waits for the signal.
    code = (
        "import sys, time\n"
        "from backends.packed import writer\n"
        "from specdec.cli.app import main\n"
        "def wait(*_):\n"
        "    print('here', flush=True)\n"
        "    time.sleep(3)\n"
        "writer._TensorWriter._written = wait\n"
        f"sys.exit(main(['pack', '-m', {str(plain)!r}, '-o', {str(out)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert any(tmp_path.glob(".packed.partial-*/*.safetensors"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}
    process.stdout.close()


def test_processes_that_were_killed_leave_nothing_for_long(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f".packed.partial-{dead.pid}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "packed"}
    assert os.listdir(tmp_path / "packed")
