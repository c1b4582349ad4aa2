"""Any history of a backend, and the required bits of each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from alone import own
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backends.contract.backend import PREFIX, Backend

CONTEXT, MAX_NODES = 60, 20
MAX_DEPTH = 7
"""Maximum depth of live nodes: llama.cpp refuses drafts of window length, 8 in tiny models."""
TOKENS = st.integers(3, 95)


class Plain:
    """Rows of logits by one token per pass, cached by their tokens."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def row(self, token_ids: Sequence[int]) -> np.ndarray:
        backend, token_ids = self.backend, tuple(token_ids)
        if token_ids not in self.rows:
            n_shared = next(
                n for n in range(len(token_ids), -1, -1) if self.is_committed(token_ids[:n])
            )
            own(backend).rollback(min(n_shared, len(token_ids) - 1))
            for n in range(own(backend).n_committed, len(token_ids)):
                ids, rows = own(backend).extend([token_ids[n]], [PREFIX])
                own(backend).commit(ids)
                self.rows[token_ids[: n + 1]] = rows[0]
        return self.rows[token_ids]

    def is_committed(self, token_ids: tuple[int, ...]) -> bool:
        return tuple(own(self.backend).committed_ids[: len(token_ids)]) == token_ids


class Fresh(Plain):
    """Rows by a pass over the whole sequence."""

    def row(self, token_ids: Sequence[int]) -> np.ndarray:
        token_ids = tuple(token_ids)
        if token_ids not in self.rows:
            own(self.backend).rollback(0)
            self.rows[token_ids] = own(self.backend).prefill(token_ids)
        return self.rows[token_ids]


class ExactMachine(RuleBasedStateMachine):
    """Any history: every row equals the plain one, bit for bit."""

    backend: Any
    plain: Plain
    beginning: Sequence[int] = ()
    """Common prefix of every sequence: all operations happen that far behind position 0."""

    @property
    def context(self):
        return CONTEXT + len(self.beginning)

    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=20))
    def begin(self, prompt):
        own(self.backend).rollback(0)
        self.token_ids, self.live = [], {}
        self.prefill([*self.beginning, *prompt])

    def check(self, row, token_ids):
        assert np.array_equal(row, self.plain.row(token_ids))

    @rule(data=st.data(), n=st.integers(1, 9))
    def extend(self, data, n):
        first, parents, tokens, paths = own(self.backend).next_node_id, [], [], {}
        for i in range(n):
            parent = data.draw(st.sampled_from([PREFIX, *self.live, *paths]))
            parents.append(parent)
            tokens.append(data.draw(TOKENS))
            paths[first + i] = (*{**self.live, **paths}.get(parent, ()), tokens[-1])
        depth = max(len(path) for path in paths.values())
        is_too_deep = depth > MAX_DEPTH or len(self.token_ids) + depth > self.context
        if len(self.live) + n > MAX_NODES or is_too_deep:
            return
        rows = data.draw(st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
        ids, logits = own(self.backend).extend(tokens, parents, rows)
        for row, values in zip(range(n) if rows is None else rows, logits, strict=True):
            self.check(values, [*self.token_ids, *paths[ids[row]]])
        self.live.update(paths)

    def path(self, node):
        return own(self.backend).store.table.path(node)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_empty=st.booleans())
    def commit(self, data, is_empty):
        path = [] if is_empty else self.path(data.draw(st.sampled_from(list(self.live))))
        below = [n for n in self.live if self.path(n)[:-1] == path]
        keep = [n for n in below if data.draw(st.booleans())]
        cached = [n for n in self.live if set(keep) & set(self.path(n))]
        self.token_ids += self.live[path[-1]] if path else []
        own(self.backend).commit(path, keep)
        self.live = {n: self.live[n][len(path) :] for n in cached}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prune(self, data):
        doomed = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=3))
        gone = [n for n in self.live if set(doomed) & set(self.path(n))]
        own(self.backend).prune(doomed)
        self.live = {n: t for n, t in self.live.items() if n not in gone}

    @rule(data=st.data())
    def rollback(self, data):
        minimum = max(0, len(self.beginning) - CONTEXT)
        self.token_ids = self.token_ids[: data.draw(st.integers(minimum, len(self.token_ids)))]
        own(self.backend).rollback(len(self.token_ids))
        self.live = {}

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12))
    def prefill(self, tokens):
        if len(self.token_ids) + len(tokens) <= self.context:
            self.token_ids, self.live = [*self.token_ids, *tokens], {}
            self.check(own(self.backend).prefill(tokens), self.token_ids)

    @precondition(lambda self: self.token_ids and self.backend.can_save_prefix)
    @rule()
    def restore(self):
        tensors = own(self.backend).prefix_tensors()
        buffers = {t.name: memoryview(bytearray(t.n_bytes)) for t in tensors}
        own(self.backend).save_prefix(buffers)
        own(self.backend).rollback(0)
        own(self.backend).load_prefix(
            self.token_ids, {t.name: (t, buffers[t.name]) for t in tensors}
        )
        self.live = {}


def try_histories(backend, plain, beginning=(), **options):
    parts = {"backend": backend, "plain": Plain(plain), "beginning": beginning}
    machine = type("Machine", (ExactMachine,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            **{"max_examples": 40, **options},
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
