"""Cells and sequences of one llama.cpp cache: how they run out and are freed, and the state after
a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_sequences import exact_source, filled_up_source, load

from backends.contract.backend import PREFIX, BackendError
from backends.contract.sequence import SequenceInput
from backends.llama.backend import LlamaBackend

pytestmark = pytest.mark.gguf


# --- capacity -------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LlamaBackend]]:
    source = exact_source("llama", tmp_path, dtype="F32", n_ctx=1000)
    made: list[LlamaBackend] = []

    def make(**options: Any) -> LlamaBackend:
        made.append(load(source, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def test_cells_of_ended_sequences_are_free(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    n_cells = backend._cells.n_free
    first, other = backend.new_sequence(), backend.new_sequence()
    other.prefill([4] * 5)
    first.prefill([5] * 50)
    fork = first.fork(40)
    first.close()
    assert backend._cells.n_free == n_cells - 45
    fork.rollback(10)
    assert backend._cells.n_free == n_cells - 15
    fork.close()
    assert backend._cells.n_free == n_cells - 5
    other.prefill([4])
    assert backend._cells.n_free == n_cells - 6


def test_cells_run_out_and_come_back(make: Callable[..., LlamaBackend]) -> None:
    """Cells of an ended sequence are reused on demand; cells behind them are moved."""
    backend = make(max_context=400, num_kv_slots=256, max_nodes=400)
    prompts = [[5 + i] * 110 for i in range(4)]
    sequences = [backend.new_sequence() for _ in prompts]
    rows = [sequence.prefill(prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
    n_free = backend._cells.n_free
    sequences[1].extend([3, 4], [PREFIX, PREFIX])
    assert sequences[0].num_free_slots == n_free - 2
    with pytest.raises(BackendError, match=f"KV cache is full: {n_free + 1} more tokens do not"):
        sequences[0].prefill([5] * (n_free + 1))
    assert [sequence.n_committed for sequence in sequences] == [110] * 4
    assert len(sequences[1].store.table) == 2
    sequences[0].close()
    sequences[1].prune([0])
    assert backend._cells.n_moved == 0
    newcomer = backend.new_sequence()
    row = newcomer.prefill(prompts[0])
    assert np.array_equal(row, rows[0])
    assert backend._cells.n_moved == 331
    for sequence, prompt, row in zip(sequences[1:], prompts[1:], rows[1:], strict=True):
        sequence.rollback(109)
        assert np.array_equal(sequence.prefill(prompt[109:]), row)


def test_cells_behind_all_others_are_free_at_once(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    first, last = backend.new_sequence(), backend.new_sequence()
    first.prefill([5] * 50)
    for _ in range(20):
        last.prefill([6] * 50)
        last.close()
        last = backend.new_sequence()
    assert backend._cells.n_moved == 0


def test_a_sequence_that_ends_before_others_is_not_moved(
    make: Callable[..., LlamaBackend],
) -> None:
    backend = make()
    first, *rest = (backend.new_sequence() for _ in range(4))
    first.prefill([5] * 30)
    for sequence in rest:
        sequence.prefill([6] * 20)
    first.close()
    for sequence in rest[:2]:
        sequence.prefill([7])
        assert backend._cells.n_moved == 0
    rest[0].close()  # 51 cells for 41: the other two sequences'
    rest[1].prefill([7])
    assert backend._cells.n_moved == 41


def test_shared_cells_are_moved_for_all_their_sequences(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    first, base = backend.new_sequence(), backend.new_sequence()
    first.prefill([5] * 50)
    base.prefill([6] * 40)
    forks = [base.fork(), base.fork(30)]
    first.close()
    row = base.prefill([7])
    assert backend._cells.n_moved == 40
    assert np.array_equal(forks[0].prefill([7]), row)
    forks[1].prefill([6] * 10)
    assert np.array_equal(forks[1].prefill([7]), row)


def test_sequences_run_out_and_come_back(make: Callable[..., LlamaBackend]) -> None:
    backend = make(max_nodes=8, max_num_seqs=2)  # ten sequences
    tree, rest = backend.new_sequence(), [backend.new_sequence() for _ in range(3)]
    tree.prefill([5, 6])
    tree.extend([7, 8, 9, 10], [PREFIX] * 4)
    with pytest.raises(BackendError, match="all of the cache's 10 sequences are in use, one for"):
        backend.new_sequence()
    with pytest.raises(
        BackendError, match="of which there are 4: draft fewer branches, end a sequence"
    ):
        rest[0].fork()
    expected = rest[0].prefill([5, 6, 7])
    with pytest.raises(BackendError, match="10 sequences are in use"):
        rest[0].extend([7, 8, 9], [PREFIX] * 3)
    assert (rest[0].n_committed, tree.n_committed) == (3, 2)
    tree.commit([])  # its leaves' sequences are idle now and reusable by others
    rest[0].extend([7, 8, 9], [PREFIX] * 3)
    rest[1].prefill([4])
    rest[1].close()
    rest[0].commit([])
    ids, rows = tree.extend([7] * 6, [PREFIX] * 6)
    assert all(np.array_equal(row, expected) for row in rows)


def test_what_fits_runs(make: Callable[..., LlamaBackend]) -> None:
    backend = make(max_nodes=8, max_num_seqs=1)  # and eight sequences
    sequences = [backend.new_sequence() for _ in range(3)]
    for sequence in sequences:
        sequence.prefill([5, 6])
    wide = [SequenceInput(sequence, [7] * 4, [PREFIX] * 4, []) for sequence in sequences]
    assert backend.n_fitting(wide) == 1
    chains = [SequenceInput(sequence, [7, 8], [PREFIX, 0], []) for sequence in sequences]
    assert backend.n_fitting([wide[0], *chains[1:]]) == 3
    backend.forward([wide[0], *chains[1:]])
    assert backend.n_fitting(chains) == 0  # nodes
    prompt = SequenceInput(sequences[0], [5] * (backend._cells.n_free + 1))
    assert backend.n_fitting([prompt]) == 0
    prompt = SequenceInput(sequences[0], [5] * 4)
    more = SequenceInput(sequences[1], [7] * 4, [1, 1, 1, 1], [])
    assert backend.n_fitting([prompt, more]) == 2
    backend.forward([prompt, more])


def test_more_rows_of_logits_than_it_was_made_for(make: Callable[..., LlamaBackend]) -> None:
    backend = make(max_nodes=8, max_outputs=3, max_num_seqs=2)
    sequences = [backend.new_sequence() for _ in range(2)]
    batch = [SequenceInput(sequence, [5, 6], logits_at=[0, 1]) for sequence in sequences]
    with pytest.raises(BackendError, match="4 rows of logits are more than the 3"):
        backend.forward(batch)
    backend.forward([batch[0], SequenceInput(sequences[1], [5, 6])])
    with pytest.raises(BackendError, match="9 live nodes are more than the 8"):
        backend.forward(
            [
                SequenceInput(sequence, [7] * n, [PREFIX] * n, [])
                for sequence, n in zip(sequences, (4, 5), strict=True)
            ]
        )
    assert sequences[0].num_free_slots == 8


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["get", "set"])
def test_a_failed_move_loses_no_sequence(
    broken: str, make: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    first, second = backend.new_sequence(), backend.new_sequence()
    expected = first.prefill([5] * 30), second.prefill([6] * 30)
    first.rollback(10)

    def fail(*_: object) -> None:
        raise BackendError("it does not work")

    with monkeypatch.context() as patch:
        patch.setattr(backend._cells.state, broken, fail)
        with pytest.raises(BackendError, match="does not work"):
            first.prefill([5] * 20)
    second.rollback(29)
    assert np.array_equal(second.prefill([6]), expected[1])
    assert np.array_equal(first.prefill([5] * 20), expected[0])


def test_a_pass_of_few_tokens_is_padded(tmp_path: Path) -> None:
    """Padding rows take cells behind the others, which are free after the pass."""
    source = filled_up_source(tmp_path)
    with load(source, max_context=100, num_kv_slots=200, max_nodes=64) as backend:
        sequences = [backend.new_sequence() for _ in range(3)]
        n_cells = backend._cells.n_free
        for i, sequence in enumerate(sequences):
            sequence.prefill([5] * min(100, n_cells - 100 * i))
        assert backend._cells.n_free == 0
        with pytest.raises(BackendError, match="KV cache is full"):
            sequences[2].extend([5], [PREFIX])
        sequences[2].rollback(n_cells - 201)
        rows = [SequenceInput(sequence, [5]) for sequence in sequences[2:]]
        backend.forward(rows)
        assert backend._cells.n_free == 0
