"""Any history of several sequences of a backend, and the row of logits that each has alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plain_rows import Plain

from backends.contract.backend import PREFIX, BackendError, ContextFull
from backends.contract.recovery import RecoverableKV, RecoveringBackend
from backends.contract.sequence import SequenceInput

MAX_SEQS = 5
CONTEXT = 60
MAX_NODES = 16  # for one sequence
tokens = st.integers(3, 95)
Path = tuple[int, ...]


@dataclass(eq=False)
class SequenceState:
    """A sequence beside the expected plain lists of tokens."""

    sequence: RecoverableKV[Any]
    committed: list[int]
    live: dict[int, Path] = field(default_factory=dict)
    """node id -> tokens from the prefix on"""

    def ids(self, node: int) -> list[int]:
        return self.sequence.store.table.path(node)

    def below(self, roots: Sequence[int]) -> set[int]:
        return {n for n in self.live if set(roots) & set(self.ids(n))}


class SequencesMachine(RuleBasedStateMachine):
    """One backend for all examples: each begins with the state that the last one left."""

    backend: RecoveringBackend[Any]
    plain: Plain
    depth: int  # maximum depth of nodes
    longest: int  # prompt
    max_seqs: int
    beginning: list[int]
    """Common prefix of every sequence: all operations happen that far behind position 0."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[SequenceState] = []

    @staticmethod
    def is_right(actual: np.ndarray, expected: np.ndarray) -> bool:
        return np.array_equal(actual, expected)

    def check(self, row: np.ndarray, token_ids: Sequence[int]) -> None:
        assert self.is_right(row, self.plain.row(token_ids))

    def a_length(self, state: SequenceState, data: st.DataObject) -> int:
        """Return the length of some prefix, not far before the end of `beginning`."""
        n_before = max(0, len(self.beginning) - 10)
        return data.draw(st.integers(n_before, len(state.committed)))

    def a_sequence(self, data: st.DataObject) -> SequenceState:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    def one_with_nodes(self, data: st.DataObject) -> SequenceState:
        return data.draw(st.sampled_from([s for s in self.sequences if s.live] or self.sequences))

    def some_sequences(self, data: st.DataObject) -> list[SequenceState]:
        return data.draw(st.lists(st.sampled_from(self.sequences), unique=True, min_size=1))

    @precondition(lambda self: len(self.sequences) < self.max_seqs)
    @rule(data=st.data())
    def reach(self, data: st.DataObject) -> None:
        new = data.draw(st.lists(tokens, min_size=1, max_size=self.longest))
        prompt = [*self.beginning, *new]
        state = SequenceState(self.backend.new_sequence(), [])
        if not self.backend.n_fitting([SequenceInput(state.sequence, prompt)]):
            state.sequence.close()
            return
        self.sequences.append(state)
        at = data.draw(st.integers(0, len(prompt) - 1))
        if at:  # in two parts, the first of which needs no logits
            actual = self.backend.forward(
                [SequenceInput(state.sequence, prompt[:at], logits_at=())]
            )
            assert actual[0].logits.shape == (0, self.backend.vocab_size)
        self.check(state.sequence.prefill(prompt[at:]), prompt)
        state.committed = prompt

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_pass_over_nodes(self, data: st.DataObject) -> None:
        self.a_pass_of_several(data, only_nodes=True)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_pass_of_several(self, data: st.DataObject, only_nodes: bool = False) -> None:
        """Run a pass over as many sequences as fit."""
        chosen = self.some_sequences(data)
        parts = [self.rows_of(state, data, only_nodes) for state in chosen]
        batch, actual = zip(*parts, strict=True)
        batch = batch[: self.backend.n_fitting(batch)]
        scores = self.backend.forward(batch)
        assert len(scores) == len(batch)
        for state, rows, paths, score in zip(chosen, batch, actual, scores, strict=False):
            assert score.node_ids == list(paths)
            ends = list(paths.values())
            if rows.parents is None:
                state.live = {}
                ends = [tuple(rows.token_ids[: i + 1]) for i in range(len(rows.token_ids))]
            for row, logits in zip(rows.logit_positions, score.logits, strict=True):
                self.check(logits, [*state.committed, *ends[row]])
            if rows.parents is None:
                state.committed += rows.token_ids
            state.live.update(paths)

    def rows_of(
        self, state: SequenceState, data: st.DataObject, only_nodes: bool = False
    ) -> tuple[SequenceInput, dict[int, Path]]:
        """Return the next tokens of a prompt, or some nodes, with all rows of logits or a few."""
        new = data.draw(st.lists(tokens, min_size=1, max_size=6))
        if len(state.committed) + len(new) > self.backend.max_context:
            length = state.sequence.restorable(max(1, len(self.beginning) - 10))
            state.sequence.rollback(length)
            state.committed, state.live = state.committed[:length], {}
        rows = data.draw(st.none() | st.lists(st.integers(0, len(new) - 1), max_size=6))
        is_full = len(state.live) + len(new) > MAX_NODES
        if is_full or not only_nodes and data.draw(st.booleans()):
            return SequenceInput(state.sequence, new, logits_at=rows), {}
        first, parents = state.sequence.next_node_id, []
        actual: dict[int, Path] = {}
        capacity = min(self.depth, self.backend.max_context - len(state.committed))
        for i, token in enumerate(new):
            known = {PREFIX: (), **state.live, **actual}
            parent = data.draw(st.sampled_from([n for n in known if len(known[n]) < capacity]))
            parents.append(parent)
            actual[first + i] = (*known[parent], token)
        return SequenceInput(state.sequence, new, parents, rows), actual

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        state = self.one_with_nodes(data)
        path = state.ids(data.draw(st.sampled_from([PREFIX, *state.live])))
        children = [n for n in state.live if state.ids(n)[:-1] == path]
        keep = [n for n in children if data.draw(st.booleans())]
        cached = state.below(keep)
        above = state.live[path[-1]] if path else ()
        state.sequence.commit(path, keep)
        state.committed += above
        state.live = {n: p[len(above) :] for n, p in state.live.items() if n in cached}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        state = self.one_with_nodes(data)
        if state.live:
            doomed = data.draw(st.lists(st.sampled_from(list(state.live)), min_size=1, max_size=3))
            gone = state.below(doomed)
            state.sequence.prune(doomed)
            state.live = {n: path for n, path in state.live.items() if n not in gone}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        state = self.a_sequence(data)
        length = state.sequence.restorable(self.a_length(state, data))
        state.sequence.rollback(length)
        state.committed, state.live = state.committed[:length], {}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), new=st.lists(tokens, min_size=1, max_size=5))
    def cut_to_another_prompt(self, data: st.DataObject, new: list[int]) -> None:
        """Go on with a prompt that may share a prefix with the present one."""
        state = self.a_sequence(data)
        n_asked = self.a_length(state, data)
        n_shared = state.sequence.restorable(n_asked)
        expected = [*state.committed[:n_asked], *new][: self.backend.max_context]
        lacking = state.sequence.cut_to(expected)
        assert 0 < len(lacking) <= max(len(expected) - n_shared, 1)
        n_left = len(expected) - len(lacking)
        if n_left < len(state.committed):
            state.committed, state.live = expected[:n_left], {}
        if self.backend.n_fitting([SequenceInput(state.sequence, lacking)]):
            self.check(state.sequence.prefill(lacking), expected)
            state.committed, state.live = expected, {}

    @precondition(lambda self: 0 < len(self.sequences) < self.max_seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        state = self.a_sequence(data)
        length = state.sequence.restorable(self.a_length(state, data))
        self.sequences.append(SequenceState(state.sequence.fork(length), state.committed[:length]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        state = self.a_sequence(data)
        self.sequences.remove(state)
        state.sequence.close()
        with pytest.raises(BackendError, match="closed"):
            state.sequence.prefill([5])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_pass_that_fails(self, data: st.DataObject) -> None:
        """Fail a pass: it drops live nodes of its own sequences only."""
        chosen = self.some_sequences(data)
        batch = [self.rows_of(state, data)[0] for state in chosen]
        sequence = chosen[-1].sequence
        first = sequence.next_node_id
        many = [9] * (self.backend.max_context - sequence.n_committed + 1)
        chain = [PREFIX, *range(first, first + len(many) - 1)]
        wrong = [([9], [first + 7]), (many, None), (many, chain)]  # the first is no live node
        batch[-1] = SequenceInput(sequence, *data.draw(st.sampled_from(wrong)))
        error = BackendError if len(batch) > 1 or batch[-1].parents else ContextFull
        with pytest.raises(error):
            self.backend.forward(batch)
        for state in chosen:
            state.live = {}
        with pytest.raises(BackendError, match="not a live node"):
            sequence.commit([sequence.next_node_id])

    @precondition(lambda self: self.sequences and self.backend.can_save_prefix)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Replace one sequence's prefix by another's saved one."""
        state, other = self.a_sequence(data), self.a_sequence(data)
        whole = SequenceInput(other.sequence, state.committed or [0])
        if not state.committed or not self.backend.n_fitting([whole]):
            return
        tensors = state.sequence.prefix_tensors()
        buffers = {t.name: memoryview(bytearray(t.n_bytes)) for t in tensors}
        state.sequence.save_prefix(buffers)
        saved = {t.name: (t, buffers[t.name]) for t in tensors}
        other.sequence.load_prefix(state.committed, saved)
        other.committed, state.live, other.live = list(state.committed), {}, {}

    @invariant()
    def lengths_are_exact(self) -> None:
        for state in self.sequences:
            assert list(state.sequence.committed_ids) == state.committed
            store = state.sequence.store
            assert set(store.table.ids) == set(state.live)
            if hasattr(store, "_ends"):  # llama.cpp: at most one of its sequences per leaf
                inner = {node for n in state.live for node in state.ids(n)[:-1]}
                assert sorted(store._ends.values()) == sorted(set(state.live) - inner)
            store.check_integrity()

    def teardown(self) -> None:
        for state in self.sequences:
            state.sequence.close()


def try_sequences(
    backend: RecoveringBackend[Any],
    plain: Plain,
    *,
    depth: int = MAX_NODES,
    longest: int = 40,
    max_seqs: int = MAX_SEQS,
    beginning: Sequence[int] = (),
    is_right: Callable[[np.ndarray, np.ndarray], bool] | None = None,
    **options: Any,
) -> None:
    """Run histories of up to `max_seqs` sequences and compare their rows with those of `plain`."""
    members = {
        "backend": backend,
        "plain": plain,
        "depth": depth,
        "longest": longest,
        "max_seqs": max_seqs,
        "beginning": list(beginning),
    }
    if is_right is not None:
        members["is_right"] = staticmethod(is_right)
    run_state_machine_as_test(
        type("Machine", (SequencesMachine,), members),
        settings=settings(
            **{"max_examples": 30, **options},
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
