"""Recurrent models on llama.cpp: any history has the bits of one token per pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kinds import TYPES, close
from gguf_streaming import by_experts
from plain_rows import Plain
from sequence_histories import try_sequences
from tiny_gguf import save_tiny_architecture
from tiny_gguf_kinds import RECURRENT

from backends.contract.backend import PREFIX, BackendError, UnsupportedModel
from backends.contract.exactness import EXACT_OFF
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.ggml.gated_delta import GatedDeltaNet
from backends.ggml.library import LlamaModel
from backends.gguf.model import _HYBRID, _RECURRENT, GgufModel, load_gguf_model
from backends.gguf.recurrent import TRIED, refuse_untried
from backends.llama.context import MAX_ROLLBACK_TOKENS, ContextOptions, LlamaContext
from backends.llama.memory import logged_sizes
from backends.llama.recurrent_backend import RecurrentLlamaBackend
from backends.llama.source import GgufSource
from backends.llama_states.store import MAX_REPLAYED
from offload.placement.placement import Placement

pytestmark = pytest.mark.gguf
TEXT = np.random.default_rng(0).integers(3, 96, 80).tolist()
Load = Callable[..., RecurrentLlamaBackend]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufSource]:
    """Return the source of a tiny model of an architecture; it is written once."""
    folder, opened = tmp_path_factory.mktemp("recurrent"), {}

    def get(name: str) -> GgufSource:
        if name not in opened:
            path = save_tiny_architecture(name, folder / f"{name}.gguf")
            opened[name] = GgufSource(path, BackendOptions(n_threads=1, is_exact=True))
        return opened[name]

    return get


@pytest.fixture
def load(source: Callable[[str], GgufSource]) -> Load:
    def make(name: str, placement: Placement | None = None, **options: Any) -> Any:
        opened = source(name)
        run = opened._run
        return RecurrentLlamaBackend(
            opened.model,
            placement=placement,
            load_mode="mmap" if placement is None else "stream",
            **{
                "n_threads": 1,
                "cache_type_k": run.type_k,
                "cache_type_v": run.type_v,
                "max_context": 60,
                "max_nodes": 80,
                "num_kv_slots": 380,
                "exactness": run.exactness,
                **options,
            },
        )

    return make


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


def counted(backend: RecurrentLlamaBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that takes the number of rows of each pass from now on."""
    rows: list[int] = []
    decode = backend._run

    def count(batch: Any) -> np.ndarray:
        rows.append(batch.n_tokens)
        return decode(batch)

    monkeypatch.setattr(backend, "_run", count)
    return rows


def test_accepted_tokens_are_replayed_with_the_next_nodes(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five nodes are accepted each time; a pass for them alone bounds the rows."""
    with load("qwen35") as backend, load("qwen35", max_context=160) as plain:
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:12])
        rows = counted(backend, monkeypatch)
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


@pytest.mark.parametrize(
    "name", ["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "kimi-linear"]
)
def test_states_of_a_streamed_pass_are_rolled_back_to_the_accepted_tokens(
    name: str, load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
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
        rows, start = counted(backend, monkeypatch), 3
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
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, n = Placement(source("qwen35").model.layers, 2), MAX_ROLLBACK_TOKENS
    with (
        load("qwen35", placement, max_context=160) as backend,
        load("qwen35", max_context=160) as plain,
    ):
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:2])
        rows, start = counted(backend, monkeypatch), 2
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
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GgufModel, "state_input_bytes", lambda *_: 4096)
    placement = Placement(source("qwen35").model.layers, 2)
    with load("qwen35", placement) as backend, load("qwen35", max_context=160) as plain:
        expected, kv = Plain(plain), backend.new_sequence()
        kv.prefill(TEXT[:9])
        rows = counted(backend, monkeypatch)
        for start in (9, 11):
            first = kv.next_node_id
            chain = [*TEXT[start : start + 2], 90]
            ids, logits = kv.extend(chain, [PREFIX, first, first + 1])
            assert np.array_equal(logits[1], expected.row(TEXT[: start + 2]))
            kv.commit(ids[:2])
        assert rows == [3, 5]


def test_the_last_of_several_sequences_is_rolled_back(
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement(source("qwen35").model.layers, 2)
    with (
        load("qwen35", placement, max_num_seqs=3) as backend,
        load("qwen35", max_context=160) as plain,
    ):
        expected, sequences = Plain(plain), [backend.new_sequence(), backend.new_sequence()]
        for i, kv in enumerate(sequences):
            kv.prefill(TEXT[i : i + 9])
        rows, start = counted(backend, monkeypatch), 9
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


def test_a_chain_that_is_accepted_whole_is_computed_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load("qwen35", exactness=EXACT_OFF) as backend:
        kv = backend.new_sequence()
        kv.prefill(TEXT[:12])
        rows = counted(backend, monkeypatch)
        for start in range(12, 32, 4):
            first = kv.next_node_id
            ids, _ = kv.extend(TEXT[start : start + 4], [PREFIX, first, first + 1, first + 2])
            kv.commit(ids)
        first = kv.next_node_id  # a chain grown node by node, as a draft's
        for i in range(4):
            kv.extend([TEXT[32 + i]], [first + i - 1 if i else PREFIX])
        assert rows == [4] * 5 + [1] * 4


def test_the_last_part_of_a_prompt_needs_no_padding(
    load: Load, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that has gone through padding is lost: the prompt would be computed in every pass."""
    exactness = replace(source("qwen35").exactness, min_batch_tokens=4)
    with (
        load("qwen35", exactness=exactness) as backend,
        load("qwen35", max_context=160, exactness=exactness) as plain,
    ):
        monkeypatch.setattr(backend, "max_num_tokens", 16)
        kv, rows = backend.new_sequence(), counted(backend, monkeypatch)
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


@pytest.mark.parametrize("name", ["qwen35", "mamba2"])
def test_states_are_planned_as_llama_cpp_allocates_them(name: str, source: Any) -> None:
    opened = source(name)
    for parallel in (1, 4):
        options = ContextOptions(60, 8, max_num_seqs=2 * parallel + 1, is_recurrent=True)
        model = LlamaModel(opened.path, "none")
        context = LlamaContext(model, options)
        n_bytes = logged_sizes(context.log)["RS"]
        context.close()
        model.close()
        planned = opened.state_bytes(parallel, 8)
        assert n_bytes - 2**14 <= planned <= n_bytes + 2**20  # the log has two decimals
        assert opened.scratch_bytes(60, 8, 8) > 0


def test_every_recurrent_architecture_runs_or_says_why(source: Any) -> None:
    model = source("mamba").model
    for name in sorted(_RECURRENT | _HYBRID | {"something-new"}):
        if name in TRIED:
            refuse_untried(replace(model, architecture=name))
            continue
        with pytest.raises(UnsupportedModel, match="does not run: [a-z]") as caught:
            refuse_untried(replace(model, architecture=name))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_llama_cpp_still_has_other_numbers_for_batches_of_rwkv7(tmp_path: Path) -> None:
    """The reason for its refusal: once this fails, it can be tried again."""
    path = save_tiny_architecture("rwkv7", tmp_path / "m.gguf")
    model = load_gguf_model(path)
    with RecurrentLlamaBackend(model, max_context=60, load_mode="mmap") as backend:
        kv, plain = backend.new_sequence(), Plain(backend)
        whole = kv.prefill(TEXT[:6])
        assert not close(whole, plain.row(TEXT[:6]))


def test_cells_that_run_out_leave_the_ends_of_prompts(
    load: Load, monkeypatch: pytest.MonkeyPatch
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
        rows = counted(backend, monkeypatch)
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
