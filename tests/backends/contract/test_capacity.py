"""Capacity of a backend for sequences, tokens and nodes: it runs out and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from alone import own
from backend_kinds import Kind

from backends.contract.backend import PREFIX, BackendError, ContextFull
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SequenceInput

SIZES: dict[str, Any] = {"max_context": 200, "num_kv_slots": 256, "max_nodes": 40}
PROMPT = [5 + i % 60 for i in range(150)]


@pytest.fixture
def backend(kind: Kind) -> Iterator[RecoveringBackend[Any]]:
    with kind.load(n_layers=2, max_num_seqs=12, **SIZES) as made:
        yield made


def test_a_fork_holds_the_prompt_once(backend: RecoveringBackend[Any]) -> None:
    first = backend.new_sequence()
    first.prefill(PROMPT)
    before = backend.kv_usage
    assert (before.n_used >= 150, before.n_shared) == (True, 0)
    forks = [first.fork() for _ in range(6)]
    assert backend.kv_usage.n_used == before.n_used
    assert backend.kv_usage.n_shared >= 6 * 150
    row = forks[0].prefill([7])
    assert before.n_used < backend.kv_usage.n_used <= before.n_used + 64  # at most a block
    first.close()
    assert np.array_equal(forks[1].prefill([7]), row)
    with pytest.raises(BackendError, match="cannot fork at 200: 151 are committed"):
        forks[1].fork(200)
    for fork in forks:
        fork.close()
    assert backend.kv_usage == (0, 0)


def test_tokens_run_out_and_come_back(backend: RecoveringBackend[Any]) -> None:
    sequences, last = [], backend.new_sequence()
    while backend.n_fitting([SequenceInput(last, PROMPT)]):
        expected = last.prefill(PROMPT)
        sequences.append(last)
        last = backend.new_sequence()
    with pytest.raises(BackendError, match="KV cache is full"):
        last.prefill(PROMPT)
    assert {sequence.n_committed for sequence in sequences} == {150}
    assert last.n_committed == 0
    sequences.pop(0).close()
    n_bytes = backend.kv_bytes
    for _ in range(3):  # what was rolled back is used again
        assert backend.n_fitting([SequenceInput(last, PROMPT)]) == 1
        assert np.array_equal(last.prefill(PROMPT), expected)
        last.rollback(0)
    assert backend.kv_bytes == n_bytes
    for sequence in sequences:
        sequence.rollback(149)
        assert np.array_equal(sequence.prefill(PROMPT[149:]), expected)


def test_nodes_run_out_and_come_back(kind: Kind) -> None:
    with kind.load(n_layers=2, **{**SIZES, "max_nodes": 8}) as backend:
        first, other = backend.new_sequence(), backend.new_sequence()
        row = first.prefill([5, 6, 7])
        other.prefill([5, 6])
        assert first.num_free_slots == other.num_free_slots == backend.num_free_nodes == 8
        chain = SequenceInput(first, [8] * 5, [PREFIX, 0, 1, 2, 3])
        more = SequenceInput(other, [7] * 3, [PREFIX, 0, 1])
        assert backend.n_fitting([chain, SequenceInput(other, [7] * 4, [PREFIX] * 4)]) == 1
        assert backend.n_fitting([chain, more]) == 2
        backend.forward([chain, more])
        assert first.num_free_slots == other.num_free_slots == 0
        with pytest.raises(BackendError, match="9 live nodes are more than the 8"):
            other.extend([7], [PREFIX])
        assert (other.n_committed, other.num_free_slots) == (2, 3)  # its nodes are dropped
        first.prune([1])
        assert other.num_free_slots == 7
        assert np.array_equal(other.extend([7], [PREFIX])[1][0], row)


def test_a_context_is_full(kind: Kind) -> None:
    sizes = {"max_context": 100, "num_kv_slots": None, "max_nodes": 64}
    with kind.load(n_layers=2, max_num_seqs=1, **sizes) as backend:
        expected = own(backend).prefill(PROMPT[:100])
        with pytest.raises(ContextFull, match="1 more tokens after 100"):
            own(backend).extend([5], [PREFIX])
        own(backend).rollback(99)
        assert np.array_equal(own(backend).extend([PROMPT[99]], [PREFIX])[1][0], expected)


def test_counted_memory_is_what_a_sequence_takes(
    kind: Kind, backend: RecoveringBackend[Any]
) -> None:
    n_tokens = 65
    before, to_come = backend.kv_bytes, backend.kv_growth_bytes(n_tokens)
    own(backend).prefill(PROMPT[:n_tokens])
    assert backend.kv_bytes <= before + to_come
    assert backend.kv_bytes <= kind.source(n_layers=2).kv_bytes(256, 40)
    assert backend.n_kv_allocated >= backend.kv_usage.n_used >= n_tokens


def test_a_part_of_a_prompt_needs_no_logits(backend: RecoveringBackend[Any]) -> None:
    sequence, whole = backend.new_sequence(), backend.new_sequence()
    expected = whole.prefill([5, 6, 7, 8])
    actual = backend.forward([SequenceInput(sequence, [5, 6], logits_at=())])[0]
    assert (actual.node_ids, actual.logits.shape) == ([], (0, backend.vocab_size))
    assert np.array_equal(sequence.prefill([7, 8]), expected)
