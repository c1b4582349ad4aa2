"""Logits of prompt tokens that are scored during a pass are those that it would return."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kinds import Kind

from backends.contract.backend import PREFIX, BackendError
from backends.contract.sequence import SequenceInput

PROMPT = [7, 3, 60, 12, 9, 41, 5, 33, 80, 2, 17, 25, 66, 71, 8, 90, 11, 4, 50, 29, 31, 77, 13, 6]


def scored(backend, sequence, token_ids, at, **more):
    rows = {}

    def score(place, row):
        assert row.shape == (backend.vocab_size,)
        rows[place] = row.copy()

    item = SequenceInput(sequence, token_ids, scored_at=at, score=score, **more)
    return rows, item


@pytest.mark.parametrize("size", [1, 5, len(PROMPT)])
def test_scored_logits_are_the_returned_ones_whatever_the_chunks(kind: Kind, size: int) -> None:
    with kind.load() as backend:
        plain = backend.new_sequence()
        parents = [PREFIX, *range(plain.next_node_id, plain.next_node_id + len(PROMPT) - 1)]
        expected = plain.extend(PROMPT, parents)[1]
        plain.close()
        sequence = backend.new_sequence()
        for start in range(0, len(PROMPT), size):
            chunk = PROMPT[start : start + size]
            rows, item = scored(backend, sequence, chunk, range(len(chunk)))
            (output,) = backend.forward([item])
            assert sorted(rows) == list(range(len(chunk)))
            for place, row in rows.items():
                assert np.array_equal(row, expected[start + place])
            assert np.array_equal(output.logits, expected[start + len(chunk) - 1][None])
        assert list(sequence.committed_ids) == PROMPT


def test_scored_tokens_of_two_sequences_beside_nodes(kind: Kind) -> None:
    with kind.load() as backend:
        first, second, third = (backend.new_sequence() for _ in range(3))
        first.prefill(PROMPT[:1])
        rows, item = scored(backend, first, PROMPT[1:], [0, 3, 22], logits_at=[])
        more_rows, more_item = scored(backend, second, PROMPT[:5], [1, 2])
        outputs = backend.forward([item, SequenceInput(third, [5, 6], [PREFIX, PREFIX]), more_item])
        assert [output.logits.shape[0] for output in outputs] == [0, 2, 1]
        assert sorted(rows) == [0, 3, 22]
        fresh = backend.new_sequence()
        for n in range(1, len(PROMPT) + 1):
            row = fresh.prefill(PROMPT[n - 1 : n])
            if n - 2 in rows:
                assert np.array_equal(rows[n - 2], row)
            if n - 1 in more_rows:
                assert np.array_equal(more_rows[n - 1], row)


def test_a_score_that_fails_ends_the_pass(kind: Kind) -> None:
    with kind.load() as backend:
        sequence = backend.new_sequence()
        sequence.prefill(PROMPT[:4])

        def fail(place, row):
            raise BackendError("no")

        with pytest.raises(BackendError, match="no"):
            backend.forward([SequenceInput(sequence, PROMPT[4:], scored_at=[0], score=fail)])
        assert list(sequence.committed_ids) == PROMPT[:4]
        assert sequence.prefill(PROMPT[4:]).shape == (backend.vocab_size,)
