"""Several texts in one pass: each has the logits that it has alone, to the bit, whatever histories
of passes, commits, rollbacks, forks and ends they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backends.attention.batch import BLOCK_ROWS
from backends.contract.backend import PREFIX, BackendError
from backends.contract.mending import KvSequence
from backends.contract.sequence import SequenceRows
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource

CONTEXT = 160
MOST_TEXTS = 5
tokens = st.integers(3, 95)


@dataclass
class Text:
    """A sequence beside the plain lists of tokens that it should stand for."""

    sequence: KvSequence
    committed: list[int]
    live: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Node id -> tokens from the prefix down."""


class SequencesMachine(RuleBasedStateMachine):
    source: HfSource
    fresh: TorchBackend  # computes every expected row by itself

    @initialize(prompt=st.lists(tokens, min_size=1, max_size=130))
    def begin(self, prompt: list[int]) -> None:
        exactness = self.source.exactness
        self.backend = TorchBackend.held_in_memory(
            self.source.model,
            max_context=CONTEXT,
            kv_rows=2 * MOST_TEXTS * CONTEXT,
            exactness=exactness,
        )
        self.texts: list[Text] = []
        self.arrive(prompt)

    def expected(self, found: list[int]) -> np.ndarray:
        self.fresh.rollback(0)
        row: np.ndarray = self.fresh.prefill(found)
        return row

    def arrive(self, prompt: list[int]) -> None:
        text = Text(self.backend.sequence(), [])
        logits = text.sequence.prefill(prompt)
        text.committed = list(prompt)
        self.texts.append(text)
        assert np.array_equal(logits, self.expected(prompt))

    @precondition(lambda self: len(self.texts) < MOST_TEXTS)
    @rule(prompt=st.lists(tokens, min_size=1, max_size=80))
    def another_text(self, prompt: list[int]) -> None:
        self.arrive(prompt)

    @rule(data=st.data())
    def a_pass_of_several(self, data: st.DataObject) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(range(len(self.texts))), unique=True, min_size=1)
        )
        batch, paths = [], []
        for number in chosen:
            rows, found = self.rows_of(self.texts[number], data)
            batch.append(rows)
            paths.append(found)
        scores = self.backend.run(batch)
        for number, found, rows, score in zip(chosen, paths, batch, scores, strict=True):
            text = self.texts[number]
            if rows.parents is None:
                text.committed += list(rows.token_ids)
                text.live = {}
                assert np.array_equal(score.logits[0], self.expected(text.committed))
                continue
            assert score.node_ids == list(found)
            for path, row in zip(found.values(), score.logits, strict=True):
                assert np.array_equal(row, self.expected([*text.committed, *path]))
            text.live.update(found)

    def rows_of(self, text: Text, data: Any) -> tuple[SequenceRows, dict[int, tuple[int, ...]]]:
        deepest = max(map(len, text.live.values()), default=0)
        room = CONTEXT - len(text.committed) - deepest
        new = data.draw(st.lists(tokens, min_size=1, max_size=max(1, min(6, room))))
        if room < len(new) + 1 or data.draw(st.booleans()):
            new = new[: max(1, CONTEXT - len(text.committed))]
            if len(text.committed) + len(new) > CONTEXT:
                text.sequence.rollback(1)
                text.committed, text.live = text.committed[:1], {}
            return SequenceRows(text.sequence, new), {}
        first, parents = text.sequence.next_node_id, []
        found: dict[int, tuple[int, ...]] = {}
        for i, token in enumerate(new):
            parent = data.draw(st.sampled_from([PREFIX, *text.live, *found]))
            parents.append(parent)
            found[first + i] = (*{**text.live, **found}.get(parent, ()), token)
        return SequenceRows(text.sequence, new, parents), found

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        text = self.texts[data.draw(st.integers(0, len(self.texts) - 1))]
        if not text.live:
            return
        end = data.draw(st.sampled_from(list(text.live)))
        path, above = text.sequence.kv.table.path(end), text.live[end]
        text.sequence.commit(path)
        text.committed += list(above)
        text.live = {}

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        text = self.texts[data.draw(st.integers(0, len(self.texts) - 1))]
        length = data.draw(st.integers(1, len(text.committed)))
        text.sequence.rollback(length)
        text.committed, text.live = text.committed[:length], {}

    @precondition(lambda self: len(self.texts) < MOST_TEXTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = self.texts[data.draw(st.integers(0, len(self.texts) - 1))]
        length = data.draw(st.integers(1, len(text.committed)))
        self.texts.append(Text(text.sequence.fork(length), text.committed[:length]))

    @precondition(lambda self: len(self.texts) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        text = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        text.sequence.close()
        with pytest.raises(BackendError, match="closed"):
            text.sequence.prefill([5])

    @invariant()
    def lengths_are_exact(self) -> None:
        if hasattr(self, "texts"):
            for text in self.texts:
                assert list(text.sequence.committed_ids) == text.committed
                text.sequence.kv.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            for text in self.texts:
                text.sequence.close()
            self.backend.close()


@pytest.fixture
def backend(checkpoint_factory: Any) -> Iterator[TorchBackend]:
    source = HfSource(checkpoint_factory("llama"), BackendOptions(is_exact=True))
    with TorchBackend.held_in_memory(
        source.model, max_context=200, kv_rows=3 * BLOCK_ROWS + 1, exactness=source.exactness
    ) as made:
        yield made


def test_a_fork_holds_the_prompt_once(backend: TorchBackend) -> None:
    first = backend.sequence()
    first.prefill([5] * (2 * BLOCK_ROWS + 3))
    n_bytes = backend.kv_bytes
    forks = [first.fork() for _ in range(20)]
    assert backend.kv_bytes == n_bytes
    forks[0].prefill([7])  # a copy of the block that is not full
    assert backend.kv_bytes == n_bytes * 4 // 3
    with pytest.raises(BackendError, match="KV cache is full: all of its 256 tokens"):
        forks[1].prefill([8])
    assert forks[1].n_committed == 2 * BLOCK_ROWS + 3
    forks[0].close()
    forks[1].prefill([8])
    with pytest.raises(BackendError, match="cannot fork at 200: 131 are committed"):
        first.fork(200)


def test_a_part_of_a_prompt_needs_no_logits(backend: TorchBackend) -> None:
    text, whole = backend.sequence(), backend.sequence()
    expected = whole.prefill([5, 6, 7, 8])
    found = text.run(SequenceRows(text, [5, 6], rows=()))
    assert (found.node_ids, found.logits.shape) == ([], (0, backend.vocab_size))
    assert np.array_equal(text.prefill([7, 8]), expected)


def test_the_room_for_nodes_is_what_other_texts_leave(backend: TorchBackend) -> None:
    first = backend.sequence()
    first.prefill([5] * (BLOCK_ROWS + 3))
    fork = first.fork()
    room = first.node_room
    assert fork.node_room == room > BLOCK_ROWS
    first.extend([7] * 10, [PREFIX] * 10)  # in a copy of the block that is not full
    assert first.node_room == room - 10
    assert fork.node_room == room  # that block is its own now
    first.extend([7] * (room - 10), [PREFIX] * (room - 10))
    assert first.node_room == 0
    with pytest.raises(BackendError, match="KV cache is full"):
        first.extend([7] * BLOCK_ROWS, [PREFIX] * BLOCK_ROWS)
    assert first.node_room == room


def test_the_own_text_of_a_backend_is_one_of_its_sequences(backend: TorchBackend) -> None:
    row = backend.prefill([5, 6, 7])
    fork = backend.text.fork(2)
    assert np.array_equal(fork.prefill([7]), row)
    rows = [SequenceRows(text, [8], [PREFIX]) for text in (backend.text, fork)]
    first, second = backend.run(rows)
    assert np.array_equal(first.logits, second.logits)
    assert backend.next_node_id == 1


def test_what_fails_leaves_every_text_as_it_was(backend: TorchBackend) -> None:
    texts = [backend.sequence() for _ in range(2)]
    rows = [text.prefill([9, 10, 11]) for text in texts]
    batch = [SequenceRows(texts[0], [12]), SequenceRows(texts[1], [13], [77])]
    with pytest.raises(BackendError, match="77, which is not a live node"):
        backend.run(batch)
    with pytest.raises(ValueError, match="in the batch twice"):
        backend.run([batch[0], batch[0]])
    for text, row in zip(texts, rows, strict=True):
        assert text.n_committed == 3
        text.rollback(2)
        assert np.array_equal(text.prefill([11]), row)


@pytest.mark.parametrize("family", ["llama", "mistral", "minicpm3", "bloom"])
def test_every_text_is_what_it_is_alone(family: str, checkpoint_factory: Any) -> None:
    source, other = (
        HfSource(checkpoint_factory(family), BackendOptions(is_exact=True)) for _ in range(2)
    )
    assert source.exactness.is_exact, source.exactness.reason
    with TorchBackend.held_in_memory(other.model, exactness=source.exactness) as fresh:
        machine = type("Machine", (SequencesMachine,), {"source": source, "fresh": fresh})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=12,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
