"""A KV cache allocates memory as it is used, never more than was reserved for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from alone import own
from tiny_pair import save_model

from backends.attention.batch import BLOCK_SIZE
from backends.contract.backend import PREFIX, BackendError
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from offload.process.memory import process_memory
from offload.units import MIB


@pytest.mark.parametrize("n_tokens", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 300])
def test_counted_memory_is_what_a_sequence_takes(tmp_path: Path, n_tokens: int) -> None:
    source = HfSource(save_model(tmp_path, seed=0), BackendOptions())
    with TorchBackend.kept_in_memory(source.model) as backend:
        to_come = backend.kv_growth_bytes(n_tokens)
        own(backend).prefill([5] * n_tokens)
        assert backend.kv_bytes <= to_come
        assert backend.kv_bytes <= source.kv_bytes(n_tokens, 0)
        min_count = source.exactness.min_batch_tokens
        assert backend.kv_growth_bytes(n_tokens - min_count) == 0
        assert backend.kv_growth_bytes(n_tokens + BLOCK_SIZE) > 0


def test_a_long_context_takes_no_memory_until_it_is_used(tmp_path: Path) -> None:
    model = save_model(tmp_path, seed=0, max_position_embeddings=2**16)
    with TorchBackend.resident(model) as backend:
        own(backend).prefill([5])
        before = process_memory().rss_bytes
        whole = (2**16) * backend._model.kv_bytes_per_token
        own(backend).prefill([5])
        assert backend._pool.n_blocks * backend._pool.block_bytes >= whole
        assert process_memory().rss_bytes - before < max(MIB, whole // 4)


def test_future_sequences_begin_a_block_each(tmp_path: Path) -> None:
    model = HfSource(save_model(tmp_path, seed=0), BackendOptions()).model
    with TorchBackend.kept_in_memory(model, num_kv_slots=4096) as backend:
        to_come = backend.kv_growth_bytes(20 * 3, 20)
        backend.forward([SequenceInput(backend.new_sequence(), [5 + i, 6, 7]) for i in range(20)])
        assert backend.kv_bytes == 20 * backend._pool.block_bytes
        assert backend.kv_bytes <= to_come


def test_a_fork_copies_the_block_that_is_not_full(tmp_path: Path) -> None:
    model = HfSource(save_model(tmp_path, seed=0), BackendOptions()).model
    with TorchBackend.kept_in_memory(
        model, max_context=200, num_kv_slots=4 * BLOCK_SIZE
    ) as backend:
        first = backend.new_sequence()
        first.prefill([5] * (BLOCK_SIZE + 3))
        n_bytes = backend.kv_bytes
        fork = first.fork()
        assert backend.kv_bytes == n_bytes
        capacity = first.num_free_slots
        assert fork.num_free_slots == capacity > BLOCK_SIZE
        first.extend([7] * 10, [PREFIX] * 10)
        assert backend.kv_bytes == n_bytes * 3 // 2
        assert first.num_free_slots == capacity - 10
        assert fork.num_free_slots == capacity  # that block is its own now
        first.extend([7] * (capacity - 10), [PREFIX] * (capacity - 10))
        assert first.num_free_slots == 0
        with pytest.raises(BackendError, match="KV cache is full: all of its 320 tokens"):
            first.extend([7] * BLOCK_SIZE, [PREFIX] * BLOCK_SIZE)
        assert first.num_free_slots == capacity
