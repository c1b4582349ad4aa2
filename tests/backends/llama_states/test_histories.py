"""Recurrent models on llama.cpp: any history has the bits of one token per pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kinds import TYPES, close
from gguf_streaming import by_experts
from plain_rows import Plain
from recurrent_models import TEXT
from sequence_histories import try_sequences
from tiny_gguf_kinds import RECURRENT

from backends.contract.backend import PREFIX, BackendError
from backends.contract.exactness import EXACT_OFF
from backends.contract.prefix_cache import PrefixCache
from backends.llama_states.store import MAX_REPLAYED
from offload.placement.placement import Placement

if TYPE_CHECKING:
    from recurrent_models import CountRows, Load

pytestmark = pytest.mark.gguf


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", RECURRENT)
def test_any_history_has_the_bits_of_one_token_per_pass(name: str, load: Load, source: Any) -> None:
    """Five sequences must take each other's states and cells. Close where attention is to
    compressed keys."""
    is_exact = source(name).exactness.is_exact
    assert is_exact == (not name.startswith("kimi"))
    types = {} if is_exact else TYPES
    with (
        load(name, max_num_seqs=5, **types) as backend,
        load(name, max_context=160, **types) as plain,
    ):
        backend._states.n_cells = 200
        is_right = np.array_equal if is_exact else close
        try_sequences(backend, Plain(plain), is_right=is_right, max_examples=4)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("name", ["qwen35", "nemotron_h", "jamba", "lfm2moe", "mamba2"])
def test_streamed_layers_change_nothing(name: str, load: Load, source: Any) -> None:
    placement = Placement(source(name).model.layers, 2)
    with load(name, placement, max_num_seqs=3) as backend, load(name, max_context=160) as plain:
        try_sequences(backend, Plain(plain), max_examples=2)
        assert backend.transfer_stats.bytes_streamed > 0


@pytest.mark.parametrize("name", ["qwen35moe"])
def test_experts_are_read_one_by_one(name: str, load: Load, source: Any) -> None:
    placement = by_experts(source(name).model, 0, n_slots=2)
    with load(name, placement) as backend, load(name, max_context=160) as plain:
        try_sequences(backend, Plain(plain), max_examples=2)
        assert backend.transfer_stats.experts_asked > 0


def test_accepted_tokens_are_replayed_with_the_next_nodes(
    load: Load, count_rows: CountRows
) -> None:
    """Two of five nodes are accepted each time; a pass for them alone bounds the rows."""
    with load("qwen35") as backend, load("qwen35", max_context=160) as plain:
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:12])
        rows = count_rows(backend)
        for start in range(12, 12 + 2 * 12, 2):
            first = kv.next_node_id
            chain = [*TEXT[start : start + 2], 90, 91, 92]
            ids, logits = kv.extend(chain, [PREFIX, *range(first, first + 4)])
            assert np.array_equal(logits[1], expected.row(TEXT[: start + 2]))
            kv.commit(ids[:2])
        n_until_full = MAX_REPLAYED // 2
        assert rows == [
            *(5 + 2 * i for i in range(n_until_full)),
            MAX_REPLAYED,
            *(5 + 2 * i for i in range(12 - n_until_full)),
        ]


def test_a_chain_that_is_accepted_whole_is_computed_once(load: Load, count_rows: CountRows) -> None:
    with load("qwen35", exactness=EXACT_OFF) as backend:
        kv = backend.new_sequence()
        kv.prefill(TEXT[:12])
        rows = count_rows(backend)
        for start in range(12, 32, 4):
            first = kv.next_node_id
            ids, _ = kv.extend(TEXT[start : start + 4], [PREFIX, first, first + 1, first + 2])
            kv.commit(ids)
        first = kv.next_node_id  # a chain grown node by node, as a draft's
        for i in range(4):
            kv.extend([TEXT[32 + i]], [first + i - 1 if i else PREFIX])
        assert rows == [4] * 5 + [1] * 4


def test_the_last_part_of_a_prompt_needs_no_padding(
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch, count_rows: CountRows
) -> None:
    """A state that has gone through padding is lost: the prompt would be computed in every pass."""
    exactness = replace(source("qwen35").exactness, min_batch_tokens=4)
    with (
        load("qwen35", exactness=exactness) as backend,
        load("qwen35", max_context=160, exactness=exactness) as plain,
    ):
        monkeypatch.setattr(backend, "max_num_tokens", 16)
        kv, rows = backend.new_sequence(), count_rows(backend)
        kv.prefill(TEXT[:35])
        logits = kv.extend([TEXT[35]], [PREFIX])[1]
        assert rows == [16, 15, 4, 4]  # of the last one three are padding
        assert np.array_equal(logits[0], Plain(plain).row(TEXT[:36]))


def test_a_second_turn_begins_at_the_end_of_the_first(load: Load) -> None:
    """The whole first turn is reused, or its prompt if the answer is given in other tokens."""
    with load("qwen35", max_num_seqs=3) as backend, load("qwen35", max_context=160) as plain:
        cache, expected = PrefixCache(backend), Plain(plain)
        first = cache.allocate(TEXT[:20])
        first.prefill(TEXT[:20])
        for token in TEXT[20:26]:
            first.commit(first.extend([token], [PREFIX])[0])
        cache.release(first)
        for prompt, n_reused in ((TEXT[:40], 26), ([*TEXT[:22], 9, 9, 9], 20)):
            second = cache.allocate(prompt)
            assert second.n_committed == n_reused
            row = second.prefill(prompt[n_reused:])
            assert np.array_equal(row, expected.row(prompt))
            cache.drop(second)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_pass_that_fails_leaves_the_committed_tokens(
    n_before: int, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load("qwen35") as backend, load("qwen35", max_context=160) as plain:
        kv, decode, n_calls = backend.new_sequence(), backend._context.decode, []
        kv.prefill(TEXT[:10])
        kv.commit(kv.extend([TEXT[10]], [PREFIX])[0])

        def fail(batch: Any) -> int:
            n_calls.append(decode(batch))
            if len(n_calls) > n_before:
                raise BackendError("failed after the pass")
            return 0

        with monkeypatch.context() as patch:
            patch.setattr(backend._context, "decode", fail)
            with pytest.raises(BackendError, match="failed after"):
                kv.extend([5, 6], [PREFIX, PREFIX])  # two branches: two passes
        row = kv.extend([TEXT[11]], [PREFIX])[1][0]
        assert np.array_equal(row, Plain(plain).row(TEXT[:12]))
