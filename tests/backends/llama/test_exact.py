"""Bit-exact llama.cpp: a row of logits depends on the tokens before it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from alone import own
from gguf_models import save_tiny_gguf
from gguf_streaming import exercise, placement, same
from hypothesis import Phase
from mapped_weights import needs_whole_pages
from plain_rows import Plain
from sequence_histories import try_sequences

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_sequences

from backends.contract.backend import PREFIX, BackendError, ContextFull
from backends.contract.source import BackendOptions, Loading
from backends.llama.source import GgufSource
from offload.placement.plan import plan_placement

CONTEXT, MAX_NODES = 60, 20
pytestmark = [pytest.mark.gguf, needs_whole_pages]


def make_source(path):
    return GgufSource(path, BackendOptions(n_threads=1, is_exact=True))


def load(source, max_context=CONTEXT, load_mode="mmap", placement=None):
    whole = plan_placement(source.layers, 1 << 40)
    return source.load(Loading(placement or whole, max_context, MAX_NODES, MAX_NODES, load_mode))


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"dtype": "F32"}),
        ("qwen3moe", {"dtype": "F32"}),
        ("llama", {"dtype": "F16"}),
        ("llama", {"dtype": "Q8_0", "feed_forward": 64}),
        ("llama", {"dtype": "Q4_K", "hidden": 256, "feed_forward": 256}),
        ("llama", {"dtype": "Q6_K", "hidden": 256, "feed_forward": 256}),
        ("mixtral", {"dtype": "Q4_K", "hidden": 256, "feed_forward": 256}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["dtype"],
)
def test_any_history_gives_the_bits_of_one_token_per_pass(family, options, tmp_path):
    source = make_source(save_tiny_gguf(family, tmp_path / "m.gguf", n_layers=2, **options))
    if family == "mixtral" and not source.exactness.is_exact:
        pytest.skip(source.exactness.reason)
    assert source.exactness.is_exact, source.exactness
    with gguf_sequences.load(source) as backend, load(source) as plain:
        backend._cells.n_cells = 90  # the sequences must take cells of ended ones
        window = backend._model.sliding_window
        options = {"depth": min(16, (window or 99) - 1), "longest": 20}
        try_sequences(backend, Plain(plain), max_examples=12, **options)
        assert backend._cells.n_moved > 0


# --- other configurations -------------------------------------------------------------------------


def long_sequence(n_tokens):
    return np.random.default_rng(0).integers(3, 96, n_tokens).tolist()


@pytest.mark.parametrize(("family", "dtype"), [("llama", "F16"), ("gemma2", "F32")])
def test_prefixes_of_many_cells(family, dtype, tmp_path):
    """llama.cpp has separate kernels for 512 cells and more, and for many rows."""
    token_ids = long_sequence(700)
    path = save_tiny_gguf(family, tmp_path / "m.gguf", n_layers=2, dtype=dtype, n_ctx=800)
    source = make_source(path)
    with load(source, 800) as backend, load(source, 800) as item:
        plain = Plain(item)
        plain.row(token_ids)
        for lengths in ([700], [513, 187], [600, 1, 99]):
            own(backend).rollback(0)
            for start, n in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
                row = own(backend).prefill(token_ids[start : start + n])
                assert np.array_equal(row, plain.row(token_ids[: start + n]))
        own(backend).rollback(600)
        first = own(backend).next_node_id
        tree = [PREFIX, PREFIX, first + 1, PREFIX, first + 1, first + 4]
        ids, rows = own(backend).extend(
            [9, token_ids[600], 5, 6, token_ids[601], token_ids[602]], tree
        )
        for i, n in ((1, 601), (4, 602), (5, 603)):
            assert np.array_equal(rows[i], plain.row(token_ids[:n]))
        own(backend).commit([ids[1], ids[4]], keep=[ids[5]])
        _, rows = own(backend).extend(token_ids[603:605], [ids[5], own(backend).next_node_id])
        assert np.array_equal(rows[-1], plain.row(token_ids[:605]))


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_K", "F16"])
def test_where_the_weights_are_decides_nothing(dtype, tmp_path):
    """Results are equal streamed, in the page cache, or in memory (repacked by default)."""
    sizes = {"hidden": 256, "feed_forward": 256}
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=3, dtype=dtype, **sizes)
    source = make_source(path)
    assert source.exactness.is_exact
    ring = placement(source.layers)
    with (
        load(source) as mapped,
        load(source, load_mode="ram") as pinned,
        load(source, load_mode="stream", placement=ring) as streamed,
    ):
        expected = exercise(mapped)
        assert same(expected, exercise(pinned))
        assert same(expected, exercise(streamed))
        assert streamed.transfer_stats.bytes_streamed > 0


def test_the_last_tokens_of_a_context_fit(tmp_path):
    """Rows that pad a pass take cells, too."""
    source, token_ids = gguf_sequences.filled_up_source(tmp_path), long_sequence(256)
    with load(source, 256) as backend, load(source, 256) as item:
        assert own(backend).num_free_slots == MAX_NODES
        own(backend).prefill(token_ids[:255])
        assert own(backend).num_free_slots == MAX_NODES
        ids, rows = own(backend).extend([token_ids[255]] * MAX_NODES, [PREFIX] * MAX_NODES)
        assert np.array_equal(rows[3], Plain(item).row(token_ids))
        own(backend).commit(ids[3:4])
        with pytest.raises(ContextFull):
            own(backend).extend([5], [PREFIX])
        assert own(backend).n_committed == 256
        assert backend.kv_bytes == source.kv_bytes(256, MAX_NODES)


def test_a_prefix_in_another_order_is_refused(tmp_path):
    source = make_source(save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=1))
    with load(source) as backend:
        leave_gaps(backend)
        own(backend).prefill([3, 4])
        own(backend).commit(own(backend).extend([9, 5], [PREFIX, PREFIX])[0][1:])
        own(backend).commit(own(backend).extend([6], [PREFIX])[0])
        (tensor,) = own(backend).prefix_tensors()
        buffer = memoryview(bytearray(tensor.n_bytes))
        own(backend).save_prefix({tensor.name: buffer})
        with pytest.raises(BackendError, match="the saved KV is not"):
            own(backend).load_prefix([3, 4, 5, 6], {tensor.name: (tensor, buffer)})
        assert own(backend).n_committed == 0


# --- necessary parts ------------------------------------------------------------------------------


def leave_gaps(backend):
    backend._cells.state = None


def leave_passes_short(backend):
    unfilled = replace(backend._options.exactness, min_batch_tokens=1)
    backend._options = replace(backend._options, exactness=unfilled)


@pytest.mark.parametrize("mistake", [leave_gaps, leave_passes_short])
def test_without_one_of_its_parts_bits_differ(mistake, tmp_path):
    source = make_source(save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=2))
    with gguf_sequences.load(source) as backend, load(source) as plain:
        mistake(backend)
        # Different bits; or a saved prefix whose cells belong to no prefix.
        with pytest.raises((AssertionError, BackendError)):
            try_sequences(backend, Plain(plain), max_examples=300, phases=[Phase.generate])
