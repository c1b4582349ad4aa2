"""Prefixes on storage: equal to the bit, and harmless whatever lies in the folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_kinds import Kind

from backends.contract.backend import Backend, KvFileError
from backends.contract.prefix_cache import PrefixCache
from backends.contract.prefix_files import PrefixFiles
from backends.contract.sequence import SequenceKV
from offload.formats.mapped import TensorShape, write_mapped

IDS = [7 + i % 60 for i in range(70)]
PLENTY = 2**30
MODEL, OTHER_MODEL = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def backend(kind: Kind) -> Iterator[Backend]:
    with kind.load(max_context=128, num_kv_slots=512) as made:
        yield made


@pytest.fixture
def sequence(backend: Backend) -> Iterator[SequenceKV]:
    kv = backend.new_sequence()
    kv.prefill(IDS)
    yield kv
    kv.close()


def make(folder: Path, model: str = MODEL, max_bytes: int = PLENTY, **more: Any) -> PrefixFiles:
    return PrefixFiles(folder, model, 96, 128, max_bytes, **more)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_logits_are_equal_to_the_bit(
    backend: Backend, sequence: SequenceKV, tmp_path: Path
) -> None:
    assert make(tmp_path).write(sequence, 1e9)
    stored = make(tmp_path).longest([*IDS[:50], 3])
    assert stored is not None
    assert (stored.length, stored.num_tokens) == (50, 70)
    other = backend.new_sequence()
    assert make(tmp_path).load(stored, other)
    for kv in (sequence, other):
        kv.rollback(50)
    rows = [kv.extend([9, 8], [-1, kv.next_node_id])[1] for kv in (sequence, other)]
    assert np.array_equal(*rows)
    other.close()


def test_a_file_that_does_not_pay_is_not_written(sequence: SequenceKV, tmp_path: Path) -> None:
    assert not make(tmp_path).write(sequence, 0.01)
    assert names(tmp_path) == []


def test_another_model_sees_nothing(
    sequence: SequenceKV, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path).write(sequence, 1e9)
    (file,) = tmp_path.iterdir()
    assert make(tmp_path, OTHER_MODEL).longest(IDS) is None
    file.rename(tmp_path / f"{OTHER_MODEL[:16]}{file.name[16:]}")  # under the other one's name
    assert make(tmp_path, OTHER_MODEL).longest(IDS) is None
    assert not caplog.records


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def foreign(path: Path) -> None:
    write_mapped(path, [TensorShape("w", "U8", (8,))], {}, lambda buffers: None)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "a flipped bit of the KV": lambda path: flip(path, -1),
    "a flipped bit of the header": lambda path: flip(path, 9),
    "of another program": foreign,
    "no safetensors": lambda path: path.write_text("notes of mine"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_note_and_replaced(
    backend: Backend,
    sequence: SequenceKV,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    make(tmp_path).write(sequence, 1e9)
    (file,) = tmp_path.iterdir()
    DAMAGES[damage](file)
    before, files = file.read_bytes(), make(tmp_path)
    stored, other = files.longest(IDS), backend.new_sequence()
    assert stored is None or not files.load(stored, other)
    assert files.longest(IDS) is None
    assert other.n_committed == 0
    (record,) = caplog.records
    assert record.message.startswith("a file of the prompt cache is ignored: ")
    assert str(file) in record.message
    assert file.read_bytes() == before
    assert files.write(sequence, 1e9)
    stored = files.longest(IDS)
    assert stored is not None
    assert files.load(stored, other)
    other.close()


def test_files_of_other_programs_are_noted_and_never_removed(
    sequence: SequenceKV, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign(tmp_path / "weights.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    files = make(tmp_path, max_bytes=1)
    assert files.longest(IDS) is None
    assert files.longest(IDS) is None
    assert len(caplog.records) == 1
    assert not files.write(sequence, 1e9)
    assert make(tmp_path).write(sequence, 1e9)
    assert {"weights.safetensors", "notes.txt"} < set(names(tmp_path))


def test_a_file_that_disappears_while_it_is_read(
    backend: Backend,
    sequence: SequenceKV,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it is opened: it is not there. Afterwards: its content is."""
    files, other = make(tmp_path), backend.new_sequence()
    files.write(sequence, 1e9)
    (file,) = tmp_path.iterdir()
    stored = files.longest(IDS)
    assert stored is not None
    load = other.load_prefix

    def remove_and_load(*arguments: Any) -> None:
        file.unlink()
        load(*arguments)

    monkeypatch.setattr(other, "load_prefix", remove_and_load)
    files.load(stored, other)
    assert other.n_committed in (0, 70)
    assert not files.load(stored, backend.new_sequence())
    assert files.longest(IDS) is None
    assert not caplog.records


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_errors_of_writing_end_nothing(
    sequence: SequenceKV,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    files = make(tmp_path)
    for _ in range(3):
        assert not files.write(sequence, 1e9)
    (record,) = caplog.records
    assert record.message == f"the prompt cache {tmp_path} cannot be written: {os.strerror(number)}"
    assert names(tmp_path) == []


def test_a_failed_kv_file_blames_no_file_of_the_cache(
    backend: Backend,
    sequence: SequenceKV,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KvFileError("the KV file in /x cannot be used")

    files, other = make(tmp_path), backend.new_sequence()
    with monkeypatch.context() as patch:
        patch.setattr(sequence, "save_prefix", fail)
        assert not files.write(sequence, 1e9)
    assert names(tmp_path) == []
    assert files.write(sequence, 1e9)
    stored = files.longest(IDS)
    assert stored is not None
    with monkeypatch.context() as patch:
        patch.setattr(other, "load_prefix", fail)
        assert not files.load(stored, other)
    assert [record.message for record in caplog.records] == [
        "a prompt is not saved: the KV file in /x cannot be used",
        "a prompt is computed, not loaded: the KV file in /x cannot be used",
    ]
    assert files.longest(IDS) == stored
    assert files.load(stored, other)


def test_the_oldest_files_of_all_models_make_space(
    backend: Backend, sequence: SequenceKV, tmp_path: Path
) -> None:
    make(tmp_path, OTHER_MODEL).write(sequence, 1e9)
    (oldest,) = tmp_path.iterdir()
    os.utime(oldest, (1, 1))
    n_bytes = oldest.stat().st_size
    files = make(tmp_path, max_bytes=2 * n_bytes + n_bytes // 2)
    for first in (90, 91, 92):
        kv = backend.new_sequence()
        kv.prefill([first, *IDS[:-1]])
        assert files.write(kv, 1e9)
        kv.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.5 * n_bytes
    assert not oldest.exists()
    assert [files.n_common([first, *IDS]) for first in (90, 91, 92)] == [0, 70, 70]


def test_a_longer_prefix_replaces_its_beginning(sequence: SequenceKV, tmp_path: Path) -> None:
    files = make(tmp_path)
    files.write(sequence, 1e9)
    before = names(tmp_path)
    sequence.prefill([5, 6, 7])
    files.write(sequence, 1e9)
    assert len(names(tmp_path)) == 1
    assert names(tmp_path) != before


def test_two_processes_share_a_folder(sequence: SequenceKV, tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert first.longest(IDS) is None
    second.write(sequence, 1e9)
    assert first.n_common(IDS) == 70  # a file that came later
    assert first.write(sequence, 1e9)  # the same one again
    assert len(names(tmp_path)) == 1
    (file,) = tmp_path.iterdir()
    file.unlink()
    assert second.longest(IDS) is None


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".{'a' * 16}-{'0' * 32}.safetensors.x1"
    for age in (0, 4000):
        left.write_bytes(b"half of it")
        os.utime(left, (left.stat().st_mtime - age,) * 2)
        make(tmp_path)
        assert left.exists() == (age == 0)


def test_a_cache_writes_what_is_new_once(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PrefixCache(backend)
    cache.files, cache.seconds = make(tmp_path), lambda num_tokens: num_tokens * 1e6
    for _ in range(2):
        kv = cache.allocate(IDS)
        kv.prefill(IDS[kv.n_committed :])
        cache.release(kv)
        cache.save_new()
    assert len(names(tmp_path)) == 1
    cache.clear()
    kv = cache.allocate([*IDS[:40], 3])
    assert kv.n_committed == 0
    kv = cache.load_longer(kv, [*IDS[:40], 3])
    assert kv.n_committed == 40
    cache.drop(kv)
    cache.clear()
