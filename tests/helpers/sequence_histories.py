"""Any history of several sequences of a backend, and the row of logits that each has alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from exact_histories import Plain
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backends.contract.backend import PREFIX, BackendError
from backends.contract.recovery import RecoverableKV, RecoveringBackend
from backends.contract.sequence import SequenceInput

MAX_SEQS = 5
MAX_NODES = 16  # of one text
tokens = st.integers(3, 95)
Path = tuple[int, ...]


@dataclass(eq=False)
class Text:
    """A sequence beside the plain lists of tokens that it should stand for."""

    sequence: RecoverableKV[Any]
    committed: list[int]
    live: dict[int, Path] = field(default_factory=dict)
    """Node id -> tokens from the prefix down."""

    def ids(self, node: int) -> list[int]:
        return self.sequence.store.table.path(node)

    def below(self, roots: Sequence[int]) -> set[int]:
        return {n for n in self.live if set(roots) & set(self.ids(n))}


class SequencesMachine(RuleBasedStateMachine):
    """One backend for all examples: each begins with what the last one left behind."""

    backend: RecoveringBackend[Any]
    plain: Plain
    depth: int  # most nodes in a row
    longest: int  # prompt

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Text] = []

    @staticmethod
    def is_right(actual: np.ndarray, expected: np.ndarray) -> bool:
        return np.array_equal(actual, expected)

    def check(self, row: np.ndarray, text: Sequence[int]) -> None:
        assert self.is_right(row, self.plain.row(text))

    def a_text(self, data: st.DataObject) -> Text:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    def some_sequences(self, data: st.DataObject) -> list[Text]:
        return data.draw(st.lists(st.sampled_from(self.sequences), unique=True, min_size=1))

    @precondition(lambda self: len(self.sequences) < MAX_SEQS)
    @rule(data=st.data())
    def reach(self, data: st.DataObject) -> None:
        prompt = data.draw(st.lists(tokens, min_size=1, max_size=self.longest))
        text = Text(self.backend.new_sequence(), [])
        if not self.backend.n_fitting([SequenceInput(text.sequence, prompt)]):
            text.sequence.close()
            return
        self.sequences.append(text)
        at = data.draw(st.integers(0, len(prompt) - 1))
        if at:  # in two parts, the first of which needs no logits
            actual = self.backend.forward([SequenceInput(text.sequence, prompt[:at], logits_at=())])
            assert actual[0].logits.shape == (0, self.backend.vocab_size)
        self.check(text.sequence.prefill(prompt[at:]), prompt)
        text.committed = prompt

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_pass_of_several(self, data: st.DataObject) -> None:
        """As many as there is room for."""
        chosen = self.some_sequences(data)
        batch, actual = zip(*(self.rows_of(text, data) for text in chosen), strict=True)
        batch = batch[: self.backend.n_fitting(batch)]
        scores = self.backend.forward(batch)
        assert len(scores) == len(batch)
        for text, rows, paths, score in zip(chosen, batch, actual, scores, strict=False):
            assert score.node_ids == list(paths)
            ends = list(paths.values())
            if rows.parents is None:
                text.live, ends = (
                    {},
                    [tuple(rows.token_ids[: i + 1]) for i in range(len(rows.token_ids))],
                )
            for row, logits in zip(rows.logit_positions, score.logits, strict=True):
                self.check(logits, [*text.committed, *ends[row]])
            if rows.parents is None:
                text.committed += rows.token_ids
            text.live.update(paths)

    def rows_of(self, text: Text, data: st.DataObject) -> tuple[SequenceInput, dict[int, Path]]:
        """The next tokens of a prompt or some nodes, of which all rows are wanted or a few."""
        new = data.draw(st.lists(tokens, min_size=1, max_size=6))
        if len(text.committed) + len(new) > self.backend.max_context:
            text.sequence.rollback(1)
            text.committed, text.live = text.committed[:1], {}
        rows = data.draw(st.none() | st.lists(st.integers(0, len(new) - 1), max_size=6))
        if len(text.live) + len(new) > MAX_NODES or data.draw(st.booleans()):
            return SequenceInput(text.sequence, new, logits_at=rows), {}
        first, parents = text.sequence.next_node_id, []
        actual: dict[int, Path] = {}
        capacity = min(self.depth, self.backend.max_context - len(text.committed))
        for i, token in enumerate(new):
            known = {PREFIX: (), **text.live, **actual}
            parent = data.draw(st.sampled_from([n for n in known if len(known[n]) < capacity]))
            parents.append(parent)
            actual[first + i] = (*known[parent], token)
        return SequenceInput(text.sequence, new, parents, rows), actual

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        text = self.a_text(data)
        path = text.ids(data.draw(st.sampled_from([PREFIX, *text.live])))
        children = [n for n in text.live if text.ids(n)[:-1] == path]
        keep = [n for n in children if data.draw(st.booleans())]
        cached = text.below(keep)
        above = text.live[path[-1]] if path else ()
        text.sequence.commit(path, keep)
        text.committed += above
        text.live = {n: p[len(above) :] for n, p in text.live.items() if n in cached}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        text = self.a_text(data)
        if text.live:
            doomed = data.draw(st.lists(st.sampled_from(list(text.live)), min_size=1, max_size=3))
            gone = text.below(doomed)
            text.sequence.prune(doomed)
            text.live = {n: path for n, path in text.live.items() if n not in gone}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        text = self.a_text(data)
        length = data.draw(st.integers(0, len(text.committed)))
        text.sequence.rollback(length)
        text.committed, text.live = text.committed[:length], {}

    @precondition(lambda self: 0 < len(self.sequences) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = self.a_text(data)
        length = data.draw(st.integers(0, len(text.committed)))
        self.sequences.append(Text(text.sequence.fork(length), text.committed[:length]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        text = self.a_text(data)
        self.sequences.remove(text)
        text.sequence.close()
        with pytest.raises(BackendError, match="closed"):
            text.sequence.prefill([5])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_pass_that_fails(self, data: st.DataObject) -> None:
        """It drops live nodes of its own sequences alone."""
        chosen = self.some_sequences(data)
        batch = [self.rows_of(text, data)[0] for text in chosen]
        unknown = chosen[-1].sequence.next_node_id + 7
        batch[-1] = SequenceInput(chosen[-1].sequence, [9], [unknown])
        with pytest.raises(BackendError, match="not a live node"):
            self.backend.forward(batch)
        for text in chosen:
            text.live = {}

    @precondition(lambda self: self.sequences and self.backend.can_save_prefix)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """One text's prefix in the place of another's."""
        text, other = self.a_text(data), self.a_text(data)
        whole = SequenceInput(other.sequence, text.committed or [0])
        if not text.committed or not self.backend.n_fitting([whole]):
            return
        tensors = text.sequence.prefix_tensors()
        buffers = {t.name: memoryview(bytearray(t.n_bytes)) for t in tensors}
        text.sequence.save_prefix(buffers)
        saved = {t.name: (t, buffers[t.name]) for t in tensors}
        other.sequence.load_prefix(text.committed, saved)
        other.committed, text.live, other.live = list(text.committed), {}, {}

    @invariant()
    def lengths_are_exact(self) -> None:
        for text in self.sequences:
            assert list(text.sequence.committed_ids) == text.committed
            assert set(text.sequence.store.table.ids) == set(text.live)
            text.sequence.store.check_integrity()

    def teardown(self) -> None:
        for text in self.sequences:
            text.sequence.close()


def try_sequences(
    backend: RecoveringBackend[Any],
    plain: Plain,
    *,
    depth: int = MAX_NODES,
    longest: int = 40,
    is_right: Callable[[np.ndarray, np.ndarray], bool] | None = None,
    **options: Any,
) -> None:
    members = {"backend": backend, "plain": plain, "depth": depth, "longest": longest}
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
