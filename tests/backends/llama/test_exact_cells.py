"""Cells of an exact llama.cpp cache: commits that move them, and the state after a failure."""

from __future__ import annotations

import numpy as np
import pytest
from alone import own
from gguf_streaming import placement

from backends.contract.backend import PREFIX, BackendError
from backends.contract.exactness import Exactness
from backends.llama.backend import LlamaBackend
from backends.llama.cells import MOVED_CELLS, check_lengths
from backends.llama.passes import PassCancelled

pytestmark = pytest.mark.gguf
EXACT = Exactness(True, min_batch_tokens=4)
PROMPT, PATH = [3, 4, 5, 6, 7], [20, 21, 22]


@pytest.fixture
def make(models):
    pytest.importorskip("llama_cpp")
    made = []

    def make(**options):
        types = {"cache_type_k": "bf16", "cache_type_v": "bf16", "exactness": EXACT}
        sizes = {"max_context": 60, "max_nodes": 32, "n_threads": 1}
        model = models("llama", n_layers=3)
        if options.pop("is_streamed", False):
            options["placement"] = placement(model.layers)
        else:
            options["load_mode"] = "mmap"
        made.append(LlamaBackend(model, **types, **sizes, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def grow(backend, num_others):
    """Return the ids of a chain of PATH, behind this many nodes that are not part of it."""
    own(backend).prefill(PROMPT)
    first = own(backend).next_node_id + num_others
    parents = [PREFIX] * (num_others + 1) + [first, first + 1]
    ids, _ = own(backend).extend([*range(40, 40 + num_others), *PATH], parents)
    return ids[num_others:]


def next_row(backend):
    return own(backend).extend([9], [PREFIX])[1][0]


def count_moves(backend, monkeypatch):
    moves = []
    move = backend._cells._move

    def count(holders, position, n_cells):
        moves.append((position, n_cells))
        move(holders, position, n_cells)

    monkeypatch.setattr(backend._cells, "_move", count)
    return moves


def test_only_gaps_cost_something(make, monkeypatch):
    backend = make()
    moves = count_moves(backend, monkeypatch)
    own(backend).commit(grow(backend, 0))
    expected = next_row(backend)
    assert moves == []
    own(backend).rollback(0)
    own(backend).commit(grow(backend, 3))
    assert moves == []  # as long as nothing new must lie behind them
    assert np.array_equal(next_row(backend), expected)
    assert moves == [(5, 3)]


def test_only_what_lies_behind_the_first_gap_is_moved(make, monkeypatch):
    backend = make()
    own(backend).prefill(PROMPT)
    first = own(backend).next_node_id
    tree = [PREFIX, first, PREFIX, first + 1, first + 3, first + 3]
    ids, _ = own(backend).extend([20, 21, 50, 22, 23, 24], tree)
    moves = count_moves(backend, monkeypatch)
    own(backend).commit(ids[:2], keep=[ids[3]])
    own(backend).extend([60], [PREFIX])
    assert moves == [(7, 1), (8, 1), (8, 1)]
    assert own(backend).store.table.ids == (*ids[3:], own(backend).next_node_id - 1)
    del moves[:]
    own(backend).prune([ids[5]])
    own(backend).extend([61], [PREFIX])
    assert moves == [(7, 1)]  # for the token 60
    del moves[:]
    own(backend).commit([ids[3]], keep=[ids[4]])
    own(backend).extend([61], [ids[4]])
    assert moves == []


def test_a_long_path_is_moved_in_pieces(make, monkeypatch):
    backend = make()
    own(backend).prefill(PROMPT)
    num_others = MOVED_CELLS + 1
    first, tokens = own(backend).next_node_id + num_others, list(range(20, 40))
    parents = [PREFIX] * (num_others + 1) + list(range(first, first + 19))
    ids, rows = own(backend).extend([50] * num_others + tokens, parents)
    moves = count_moves(backend, monkeypatch)
    own(backend).commit(ids[num_others:-1])
    assert np.array_equal(own(backend).extend(tokens[19:], [PREFIX])[1][0], rows[-1])
    assert moves == [(5, 8), (13, 8), (21, 3)]


@pytest.mark.parametrize("broken", ["get", "set"])
def test_a_move_that_fails_leaves_the_prefix(broken, make, monkeypatch):
    backend = make()
    path = grow(backend, 2)

    def fail(*_):
        raise BackendError("it does not work")

    with monkeypatch.context() as patch:
        patch.setattr(backend._cells.state, broken, fail)
        own(backend).commit(path)
        with pytest.raises(BackendError, match="does not work"):
            next_row(backend)
    assert list(own(backend).committed_ids) == PROMPT + PATH
    own(backend).store.check_integrity()
    actual = next_row(backend)
    own(backend).rollback(0)
    own(backend).prefill(PROMPT + PATH)
    assert np.array_equal(next_row(backend), actual)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_broken_pass_leaves_no_padding_rows(make, is_streamed, monkeypatch):
    backend = make(is_streamed=is_streamed)
    own(backend).prefill(PROMPT)
    expected = next_row(backend)
    own(backend).commit([])
    decode = backend._context.decode

    def cancel(batch):
        backend.request_cancel()
        return decode(batch)

    with monkeypatch.context() as patch:
        patch.setattr(backend._context, "decode", cancel)
        with pytest.raises(PassCancelled):
            next_row(backend)
    check_lengths(backend._model.library, backend._context.memory, {backend._cells.scratch: 0})
    assert np.array_equal(next_row(backend), expected)
