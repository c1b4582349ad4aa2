"""Temporary files lie on storage, or nowhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from offload.process.temporary import file_system, is_memory, temporary_folder


def mount(root: Path, folder: Path, kind: str) -> Path:
    """Simulate a /proc that lists one file system."""
    number = folder.stat().st_dev
    (root / "self").mkdir(parents=True)
    line = f"30 1 {os.major(number)}:{os.minor(number)} / {folder} rw shared:1 - {kind} none rw\n"
    (root / "self" / "mountinfo").write_text(f"29 1 999:999 / /a rw - ext4 x rw\n{line}")
    return root


def test_the_folder_that_is_named_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    proc = mount(tmp_path / "proc", tmp_path, "ext4")
    assert file_system(tmp_path, proc) == "ext4"
    assert not is_memory(tmp_path, proc)
    assert temporary_folder(proc) == tmp_path
    assert temporary_folder(tmp_path / "no proc") == tmp_path


def test_none_that_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    proc = mount(tmp_path / "proc", tmp_path, "tmpfs")
    same = tmp_path.stat().st_dev == os.stat("/var/tmp").st_dev
    assert is_memory(tmp_path, proc)
    assert temporary_folder(proc) == (None if same else Path("/var/tmp"))
