"""Tree bookkeeping against a plain model of it: lists of token paths."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract.backend import PREFIX, BackendError
from backends.contract.nodes import NodeTable, table_bytes


def add(table, parents):
    """Add nodes, each with its own id as its token."""
    return table.add(parents, range(table.next_id, table.next_id + len(parents)))


def test_a_chain_sees_itself_and_all_above():
    table = NodeTable()
    table.append([0] * 5)
    assert add(table, [PREFIX, 0, 1]) == [0, 1, 2]
    assert table.positions().tolist() == [5, 6, 7]
    assert table.visible().tolist() == np.tril(np.ones((3, 3), bool)).tolist()


def test_siblings_do_not_see_each_other():
    table = NodeTable()
    add(table, [PREFIX, 0, 0])
    assert table.positions().tolist() == [0, 1, 1]
    assert table.visible()[2].tolist() == [True, False, True]


def test_a_later_extend_hangs_on_live_nodes():
    table = NodeTable()
    add(table, [PREFIX, 0])
    assert add(table, [1, PREFIX]) == [2, 3]
    assert table.visible(2).tolist() == [[True, True, True, False], [False, False, False, True]]


def test_commit_moves_the_path_and_keeps_the_subtree():
    table = NodeTable()
    add(table, [PREFIX, 0, 0, 2, 2])  # 0 -> 1, 2; 2 -> 3, 4
    assert table.commit([0, 2], keep=[4]) == [0, 2, 4]
    assert (table.n_committed, table.ids, table.positions().tolist()) == (2, (4,), [2])
    assert add(table, [4, PREFIX]) == [5, 6]
    assert table.positions().tolist() == [2, 3, 2]


@pytest.mark.parametrize("path", [[1], [0, 3], [7], [0, 0]])
def test_commit_refuses_what_is_no_chain(path):
    table = NodeTable()
    add(table, [PREFIX, 0, 0, 2])
    with pytest.raises(BackendError):
        table.commit(path)
    assert table.n_committed == 0
    assert len(table) == 4


def test_keep_must_lie_below_the_path():
    table = NodeTable()
    add(table, [PREFIX, 0, 0])
    with pytest.raises(BackendError, match="no child"):
        table.commit([0, 1], keep=[2])


def test_unknown_parent_adds_nothing():
    table = NodeTable()
    with pytest.raises(BackendError, match="node 1 has parent 9"):
        add(table, [PREFIX, 9])
    assert len(table) == 0
    assert table.next_id == 0


def test_rollback_is_absolute():
    table = NodeTable()
    table.append([0] * 4)
    add(table, [PREFIX])
    with pytest.raises(BackendError, match="cannot roll back to 5"):
        table.rollback(5)
    with pytest.raises(BackendError):
        table.rollback(-1)
    table.rollback(2)
    assert (table.n_committed, len(table)) == (2, 0)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_histories_agree_with_token_paths(data):
    """Rows, visibility and positions always describe the same paths as a dict of paths."""
    table, paths, committed = NodeTable(), {}, []
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["add", "add", "append", "commit", "prune", "rollback"]))
        if action == "add":
            for node in range(table.next_id, table.next_id + data.draw(st.integers(1, 5))):
                parent = data.draw(st.sampled_from([PREFIX, *paths]))
                assert add(table, [parent]) == [node]
                paths[node] = (*paths.get(parent, ()), node)
        elif action == "commit" and paths:
            path = paths[data.draw(st.sampled_from(list(paths)))]
            children = [n for n, p in paths.items() if p[:-1] == path]
            keep = data.draw(st.lists(st.sampled_from(children), unique=True)) if children else []
            table.commit(path, keep)
            committed += path
            paths = {
                n: p[len(path) :]
                for n, p in paths.items()
                if p[: len(path)] == path and len(p) > len(path) and p[len(path)] in keep
            }
        elif action == "prune" and paths:
            doomed = data.draw(st.lists(st.sampled_from(list(paths)), min_size=1, unique=True))
            table.prune(doomed)
            paths = {n: p for n, p in paths.items() if not set(p) & set(doomed)}
        elif action == "append":
            table.drop_live()
            table.append([-1, -2])
            committed, paths = [*committed, -1, -2], {}
        elif action == "rollback":
            committed = committed[: data.draw(st.integers(0, len(committed)))]
            table.rollback(len(committed))
            paths = {}
        assert table.committed == committed
        assert table.n_committed == len(committed)
        assert list(table.ids) == list(paths)
        assert table.positions().tolist() == [len(committed) + len(p) - 1 for p in paths.values()]
        seen = [{table.ids[c] for c in np.flatnonzero(row)} for row in table.visible()]
        assert seen == [set(p) for p in paths.values()]


def test_the_memory_that_is_planned_for_is_not_exceeded():
    n_nodes = 1500
    tracemalloc.start()
    try:
        table = NodeTable()
        for _ in range(10):
            add(table, [PREFIX] * (n_nodes // 10))
        table.prune([0])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    per_node = 500  # ids, tokens, parents and depths, in lists
    assert peak_bytes < table_bytes(n_nodes) + per_node * n_nodes
