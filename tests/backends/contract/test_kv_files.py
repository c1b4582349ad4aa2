"""Saved KV: its size limit, and bit-exact restoring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_kinds import Kind

from backends.contract.backend import Backend
from backends.contract.kv_files import KvFiles

IDS = [7 + i % 60 for i in range(70)]


@pytest.fixture(scope="module")
def backend(kind: Kind) -> Iterator[Backend]:
    with kind.load(max_context=128, num_kv_slots=512) as made:
        yield made


def test_logits_are_bit_equal_beside_other_sequences(backend: Backend, tmp_path: Path) -> None:
    files = KvFiles(backend, lambda: tmp_path)
    sequence, other = backend.new_sequence(), backend.new_sequence()
    sequence.prefill(IDS)
    other.prefill(IDS[::-1])
    node_ids, _ = sequence.extend([5, 6], [-1, -1])
    sequence.commit(node_ids[1:])
    file = files.write(sequence)
    assert file is not None
    assert list(file.token_ids) == [*IDS, 6]
    expected = sequence.extend([9, 8, 7], [-1, sequence.next_node_id, -1])[1]
    sequence.close()
    other.prefill([3])
    again = backend.new_sequence()
    assert file.load(again)
    file.close()
    assert list(again.committed_ids) == [*IDS, 6]
    actual = again.extend([9, 8, 7], [-1, again.next_node_id, -1])[1]
    assert np.array_equal(actual, expected)
    again.close()
    other.close()
    assert files.n_bytes == 0


def test_there_are_so_many_and_no_more(backend: Backend, tmp_path: Path) -> None:
    sequence = backend.new_sequence()
    assert KvFiles(backend, lambda: tmp_path).write(sequence) is None, "there is nothing to write"
    sequence.prefill(IDS)
    item = KvFiles(backend, lambda: tmp_path).write(sequence)
    assert item is not None
    files = KvFiles(backend, lambda: tmp_path, max_bytes=item.n_bytes)
    first = files.write(sequence)
    assert first is not None
    assert files.write(sequence) is None
    first.close()
    second = files.write(sequence)
    assert second is not None
    for file in (item, first, second):
        file.close()
    sequence.close()


def test_without_a_folder_or_memory_for_it_there_is_none(backend: Backend, tmp_path: Path) -> None:
    asked: list[int] = []
    sequence = backend.new_sequence()
    sequence.prefill(IDS)
    largest = max(tensor.n_bytes for tensor in sequence.prefix_tensors())
    assert KvFiles(backend, lambda: None).write(sequence) is None
    assert KvFiles(backend, lambda: tmp_path / "none").write(sequence) is None
    assert KvFiles(backend, lambda: tmp_path, asked.append).write(sequence) is None  # type: ignore[arg-type,func-returns-value]
    assert asked == [largest]
    sequence.close()
