"""Recurrent states beyond the cells that llama.cpp has: the tokens are computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from plain_rows import Plain
from recurrent_models import TEXT

from backends.contract.backend import PREFIX
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput

if TYPE_CHECKING:
    from recurrent_models import CountRows, Load

pytestmark = pytest.mark.gguf


def test_sequences_beyond_the_states_compute_theirs_again(load: Load) -> None:
    with load("mamba2", max_num_seqs=1) as backend, load("mamba2", max_context=160) as plain:
        expected = Plain(plain)
        sequences = [backend.new_sequence() for _ in range(backend._states.n_sequences + 2)]
        for number, kv in enumerate(sequences):
            kv.prefill([7 + number, *TEXT[:5]])
        batch = [SequenceInput(kv, [11, 12], [PREFIX, kv.next_node_id]) for kv in sequences]
        for number, output in enumerate(backend.forward(batch)):
            row = expected.row([7 + number, *TEXT[:5], 11, 12])
            assert np.array_equal(output.logits[1], row)


def test_a_sequence_that_lost_its_states_is_not_reused(load: Load) -> None:
    """It would be computed again, and counted as reused."""
    with load("mamba2", max_num_seqs=1) as backend, load("mamba2", max_context=160) as plain:
        cache, expected = PrefixCache(backend), Plain(plain)
        first = cache.allocate(TEXT[:20])
        first.prefill(TEXT[:20])
        cache.release(first)
        assert cache.n_common(TEXT[:30]) == 20
        running = [backend.new_sequence() for _ in range(backend._states.n_sequences)]
        for kv in running:
            kv.prefill(TEXT[40:50])
        assert cache.n_common(TEXT[:30]) == 0
        second = cache.allocate(TEXT[:30])
        assert second.n_committed == 0
        assert np.array_equal(second.prefill(TEXT[:30]), expected.row(TEXT[:30]))
        kv = running[0]  # a running one keeps its tokens, and computes them with its next nodes
        logits = kv.extend(TEXT[50:52], [PREFIX, kv.next_node_id])[1]
        assert kv.n_committed == 10
        assert np.array_equal(logits[1], expected.row(TEXT[40:52]))


def test_cells_that_run_out_leave_the_ends_of_prompts(
    load: Load, monkeypatch: pytest.MonkeyPatch, count_rows: CountRows
) -> None:
    """Rejected nodes of two sequences take all cells; each computes its answer again, and not its
    prompt."""
    with load("qwen35", max_num_seqs=6) as backend, load("qwen35", max_context=160) as plain:
        cache, expected = PrefixCache(backend), Plain(plain)
        backend._states.n_cells = 150
        written = [[5, *TEXT[:30]], [6, *TEXT[:30]]]
        kvs = [cache.allocate(ids) for ids in written]
        for kv, ids in zip(kvs, written, strict=True):
            kv.prefill(ids)
        n_bases: list[int] = []
        release = backend._states._return_to_checkpoints

        def noted() -> None:
            n_bases.extend(kv.store.n_base for kv in kvs)
            release()

        monkeypatch.setattr(backend._states, "_return_to_checkpoints", noted)
        rows = count_rows(backend)
        for token in TEXT[40:62]:
            batch = []
            for kv in kvs:
                first = kv.next_node_id
                parents = [PREFIX, first, first + 1, first + 2]
                batch.append(SequenceInput(kv, [token, 91, 92, 93], parents))
            for kv, ids, output in zip(kvs, written, backend.forward(batch), strict=True):
                ids.append(token)
                assert np.array_equal(output.logits[0], expected.row(ids))
                kv.commit(output.node_ids[:1])
        assert max(n_bases) > 31  # states after the prompts were given up
        assert max(rows) < 30
        for kv, ids in zip(kvs, written, strict=True):
            assert kv.n_committed == len(ids)
            cache.release(kv)
        backend._states._return_to_checkpoints()
        assert cache.n_common([*written[0], 7, 8]) == 31  # what is kept, the prompt's end
        second = cache.allocate([*written[0], 7, 8])
        row = second.prefill([*written[0], 7, 8][second.n_committed :])
        assert np.array_equal(row, expected.row([*written[0], 7, 8]))


def test_sequences_behind_unused_cells_forget_theirs(load: Load) -> None:
    """The second prompt's cells lie behind the first answer's, which are freed with them alone."""
    with load("qwen35", max_num_seqs=3) as backend, load("qwen35", max_context=160) as plain:
        cache, expected = PrefixCache(backend), Plain(plain)
        backend._states.n_cells = 100
        first = cache.allocate(TEXT[:30])
        first.prefill(TEXT[:30])
        for token in TEXT[30:40]:
            first.commit(first.extend([token], [PREFIX])[0])
        second = cache.allocate([9, *TEXT[:20]])
        second.prefill([9, *TEXT[:20]])
        backend._states._return_to_checkpoints()
        assert cache.n_common([9, *TEXT[:20], 3]) == 0
        assert cache.n_common(TEXT[:41]) == 30
        logits = second.extend([TEXT[20]], [PREFIX])[1]
        assert np.array_equal(logits[0], expected.row([9, *TEXT[:21]]))
        logits = first.extend([TEXT[40]], [PREFIX])[1]
        assert np.array_equal(logits[0], expected.row(TEXT[:41]))
