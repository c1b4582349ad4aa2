"""Rollback of recurrent states: no accepted token of a streamed pass is computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kinds import TYPES, close
from plain_rows import Plain
from recurrent_models import TEXT

from backends.contract.backend import PREFIX
from backends.ggml.gated_delta import GatedDeltaNet
from backends.gguf.model import GgufModel
from backends.llama.context import MAX_ROLLBACK_TOKENS
from offload.placement.placement import Placement

if TYPE_CHECKING:
    from recurrent_models import CountRows, Load

pytestmark = pytest.mark.gguf


@pytest.mark.parametrize(
    "name", ["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "kimi-linear"]
)
def test_states_of_a_streamed_pass_are_rolled_back_to_the_accepted_tokens(
    name: str, load: Load, source: Any, count_rows: CountRows
) -> None:
    """No accepted token is computed again: not after rejected ones, nor after padding. Trees of the
    planned size fill the planned memory."""
    is_exact = source(name).exactness.is_exact
    is_right = np.array_equal if is_exact else close
    options = {} if is_exact else TYPES
    if is_exact:
        options = {"exactness": replace(source(name).exactness, min_batch_tokens=4)}
    placement = Placement(source(name).model.layers, 2)
    with (
        load(name, placement, n_threads=2, max_nodes=5, **options) as backend,
        load(name, max_context=160, **options) as plain,
    ):
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:3])
        rows, start = count_rows(backend), 3
        for n_accepted in (1, 3, 0, 5, 2, 4, 1, 1, 5, 3):
            first = kv.next_node_id
            chain = [*TEXT[start : start + n_accepted], 90, 91, 92, 93, 94][:5]
            ids, logits = kv.extend(chain, [PREFIX, *range(first, first + 4)])
            for i in range(n_accepted):
                assert is_right(logits[i], expected.row(TEXT[: start + i + 1]))
            kv.commit(ids[:n_accepted])
            start += n_accepted
        for _ in range(3):
            ids, logits = kv.extend([TEXT[start]], [PREFIX])
            assert is_right(logits[0], expected.row(TEXT[: start + 1]))
            kv.commit(ids)
            start += 1
        assert rows == [5] * 10 + [4 if is_exact else 1] * 3
        assert kv.snapshot_lengths[-1] == start
        buffers = {t.name: bytearray(t.n_bytes) for t in kv.prefix_tensors()}
        kv.save_prefix({name: memoryview(buffer) for name, buffer in buffers.items()})
        tensors = {t.name: (t, memoryview(buffers[t.name])) for t in kv.prefix_tensors()}
        other = backend.new_sequence()
        other.load_prefix(TEXT[:start], tensors)
        logits = other.extend(TEXT[start : start + 2], [PREFIX, other.next_node_id])[1]
        assert is_right(logits[1], expected.row(TEXT[: start + 2]))


def test_a_wide_pass_is_rolled_back_to_its_first_tokens(
    load: Load, source: Any, count_rows: CountRows
) -> None:
    placement, n = Placement(source("qwen35").model.layers, 2), MAX_ROLLBACK_TOKENS
    with (
        load("qwen35", placement, max_context=160) as backend,
        load("qwen35", max_context=160) as plain,
    ):
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:2])
        rows, start = count_rows(backend), 2
        for n_accepted in (n, 2, n + 1, 2):
            first = kv.next_node_id
            chain = [*TEXT[start : start + n_accepted], 90, 91]
            ids, _ = kv.extend(chain, [PREFIX, *range(first, first + len(chain) - 1)])
            kv.commit(ids[:n_accepted])
            start += n_accepted
        logits = kv.extend([TEXT[start]], [PREFIX])[1]
        assert np.array_equal(logits[0], expected.row(TEXT[: start + 1]))
        last = backend._options.min_batch_tokens
        assert rows == [n + 2, 4, n + 3, n + 1, 4, last]  # once one token too many was accepted


def test_inputs_beyond_the_planned_memory_are_computed_again(
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch, count_rows: CountRows
) -> None:
    monkeypatch.setattr(GgufModel, "state_input_bytes", lambda *_: 4096)
    placement = Placement(source("qwen35").model.layers, 2)
    with load("qwen35", placement) as backend, load("qwen35", max_context=160) as plain:
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:9])
        rows = count_rows(backend)
        for start in (9, 11):
            first = kv.next_node_id
            chain = [*TEXT[start : start + 2], 90]
            ids, logits = kv.extend(chain, [PREFIX, first, first + 1])
            assert np.array_equal(logits[1], expected.row(TEXT[: start + 2]))
            kv.commit(ids[:2])
        assert rows == [3, 5]


def test_the_last_of_several_sequences_is_rolled_back(
    load: Load, source: Any, count_rows: CountRows
) -> None:
    placement = Placement(source("qwen35").model.layers, 2)
    with (
        load("qwen35", placement, max_num_seqs=3) as backend,
        load("qwen35", max_context=160) as plain,
    ):
        expected, sequences = Plain(plain), [backend.new_sequence(), backend.new_sequence()]
        for i, kv in enumerate(sequences):
            kv.prefill(TEXT[i : i + 9])
        rows, start = count_rows(backend), 9
        for _ in range(2):
            extended = []
            for i, kv in enumerate(sequences):
                first, at = kv.next_node_id, start + i
                chain = [*TEXT[at : at + 2], 90, 91, 92]
                ids, logits = kv.extend(chain, [PREFIX, *range(first, first + 4)])
                assert np.array_equal(logits[1], expected.row(TEXT[i : at + 2]))
                extended.append(ids)
            for kv, ids in zip(sequences, extended, strict=True):
                kv.commit(ids[:2])
            start += 2
        assert rows == [5, 5, 7, 5]


def test_a_rollback_that_fails_leaves_the_committed_tokens(
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> np.ndarray:
        raise MemoryError

    placement = Placement(source("qwen35").model.layers, 2)
    with load("qwen35", placement) as backend, load("qwen35", max_context=160) as plain:
        kv = backend.new_sequence()
        kv.prefill(TEXT[:9])
        first = kv.next_node_id
        ids, _ = kv.extend([*TEXT[9:11], 90], [PREFIX, first, first + 1])
        with monkeypatch.context() as patched:
            patched.setattr(GatedDeltaNet, "state_after", fail)
            with pytest.raises(MemoryError):
                kv.commit(ids[:2])
        assert kv.n_committed == 9
        logits = kv.extend([TEXT[9]], [PREFIX])[1]
        assert np.array_equal(logits[0], Plain(plain).row(TEXT[:10]))
