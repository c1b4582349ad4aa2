"""Unfinished output never stays beside its destination."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grown_models import LARGE, SMALL, save_source

from bench.synth.checkpoint import grow
from offload.storage.unfinished import unfinished

ROOT = Path(__file__).resolve().parents[3]


def id_of_a_dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "bench", "synth", "--size", "4GB", "-o", str(tmp_path / "grown")]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the signal may be ignored here
    )
    while not any(tmp_path.glob(".grown.partial-*/*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Removal precedes the space check: it may be the whole disk. Other or running files stay."""
    source = save_source(tmp_path / "small", SMALL)
    dead, alive = id_of_a_dead_process(), os.getppid()
    for left in (f".grown.partial-{dead}", f".grown.partial-{alive}", f".other.partial-{dead}"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".grown.partial-mine").write_text("no number")
    grow(source, tmp_path / "grown", LARGE)
    left = {path.name for path in tmp_path.glob(".*")}
    assert left == {f".grown.partial-{alive}", f".other.partial-{dead}", ".grown.partial-mine"}


def test_files_are_removed_like_folders(tmp_path: Path) -> None:
    (tmp_path / f".m.gguf.partial-{id_of_a_dead_process()}").write_bytes(b"GGUF")
    (tmp_path / f".m.gguf.partial-{os.getpid()}").write_bytes(b"of one that had our id before us")
    with unfinished(tmp_path / "m.gguf") as path:
        assert list(tmp_path.iterdir()) == []
        path.write_bytes(b"GGUF")
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with unfinished(tmp_path / "m.gguf"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
