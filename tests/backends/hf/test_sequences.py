"""Several sequences in one pass: each has the logits that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from alone import own
from exact_histories import Fresh
from sequence_histories import try_sequences

from backends.attention.batch import BLOCK_SIZE
from backends.contract.backend import PREFIX, BackendError
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource

CONTEXT = 160


@pytest.fixture
def backend(checkpoint_factory: Any) -> Iterator[TorchBackend]:
    source = HfSource(checkpoint_factory("llama"), BackendOptions(is_exact=True))
    with TorchBackend.kept_in_memory(
        source.model, max_context=200, num_kv_slots=3 * BLOCK_SIZE + 1, exactness=source.exactness
    ) as made:
        yield made


def test_a_fork_holds_the_prompt_once(backend: TorchBackend) -> None:
    first = backend.new_sequence()
    first.prefill([5] * (2 * BLOCK_SIZE + 3))
    n_bytes = backend.kv_bytes
    forks = [first.fork() for _ in range(20)]
    assert backend.kv_bytes == n_bytes
    forks[0].prefill([7])  # a copy of the block that is not full
    assert backend.kv_bytes == n_bytes * 4 // 3
    with pytest.raises(BackendError, match="KV cache is full: all of its 256 tokens"):
        forks[1].prefill([8])
    assert forks[1].n_committed == 2 * BLOCK_SIZE + 3
    forks[0].close()
    forks[1].prefill([8])
    with pytest.raises(BackendError, match="cannot fork at 200: 131 are committed"):
        first.fork(200)


def test_a_part_of_a_prompt_needs_no_logits(backend: TorchBackend) -> None:
    sequence, whole = backend.new_sequence(), backend.new_sequence()
    expected = whole.prefill([5, 6, 7, 8])
    actual = backend.forward([SequenceInput(sequence, [5, 6], logits_at=())])[0]
    assert (actual.node_ids, actual.logits.shape) == ([], (0, backend.vocab_size))
    assert np.array_equal(sequence.prefill([7, 8]), expected)


def test_the_capacity_for_nodes_is_what_other_sequences_leave(backend: TorchBackend) -> None:
    first = backend.new_sequence()
    first.prefill([5] * (BLOCK_SIZE + 3))
    fork = first.fork()
    capacity = first.num_free_slots
    assert fork.num_free_slots == capacity > BLOCK_SIZE
    first.extend([7] * 10, [PREFIX] * 10)  # in a copy of the block that is not full
    assert first.num_free_slots == capacity - 10
    assert fork.num_free_slots == capacity  # that block is its own now
    first.extend([7] * (capacity - 10), [PREFIX] * (capacity - 10))
    assert first.num_free_slots == 0
    with pytest.raises(BackendError, match="KV cache is full"):
        first.extend([7] * BLOCK_SIZE, [PREFIX] * BLOCK_SIZE)
    assert first.num_free_slots == capacity


def test_the_own_sequence_of_a_backend_is_one_of_its_sequences(backend: TorchBackend) -> None:
    row = own(backend).prefill([5, 6, 7])
    fork = own(backend).fork(2)
    assert np.array_equal(fork.prefill([7]), row)
    rows = [SequenceInput(sequence, [8], [PREFIX]) for sequence in (own(backend), fork)]
    first, second = backend.forward(rows)
    assert np.array_equal(first.logits, second.logits)
    assert own(backend).next_node_id == 1


def test_a_failure_leaves_every_sequence_unchanged(backend: TorchBackend) -> None:
    sequences = [backend.new_sequence() for _ in range(2)]
    rows = [sequence.prefill([9, 10, 11]) for sequence in sequences]
    batch = [SequenceInput(sequences[0], [12]), SequenceInput(sequences[1], [13], [77])]
    with pytest.raises(BackendError, match="77, which is not a live node"):
        backend.forward(batch)
    with pytest.raises(ValueError, match="in the batch twice"):
        backend.forward([batch[0], batch[0]])
    for sequence, row in zip(sequences, rows, strict=True):
        assert sequence.n_committed == 3
        sequence.rollback(2)
        assert np.array_equal(sequence.prefill([11]), row)


@pytest.mark.parametrize("family", ["llama", "mistral", "minicpm3", "bloom"])
def test_every_sequence_equals_itself_alone(family: str, checkpoint_factory: Any) -> None:
    """Any history of passes, commits, rollbacks, forks and ends is bit-equal to running alone."""
    source, other = (
        HfSource(checkpoint_factory(family), BackendOptions(is_exact=True)) for _ in range(2)
    )
    assert source.exactness.is_exact, source.exactness.reason
    options = {"max_context": CONTEXT, "exactness": source.exactness}
    with (
        TorchBackend.kept_in_memory(
            source.model, num_kv_slots=5 * BLOCK_SIZE, **options
        ) as backend,
        TorchBackend.kept_in_memory(other.model, **options) as fresh,
    ):
        try_sequences(backend, Fresh(fresh), longest=130, max_examples=15)
