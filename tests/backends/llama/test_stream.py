"""A streamed GGUF model computes exactly the logits of the same model in memory."""

import ctypes
import mmap

import numpy as np
import pytest
from alone import own
from gguf_models import FAMILIES

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_streaming import PROMPT, exercise, in_memory, pinned, same, streamed

from backends.contract.backend import PREFIX, ContextFull

pytestmark = pytest.mark.gguf


def bare(model):
    return model.layers


def one_role(model):
    """The down projections of all layers stay in memory."""
    return [pinned(layer, lambda name: "ffn_down" in name) for layer in model.layers]


def first_and_last_layer(model):
    last = len(model.layers) - 1
    return [
        pinned(layer, lambda name, keep=i in (0, last): keep)
        for i, layer in enumerate(model.layers)
    ]


def all_but_one_layer(model):
    return [pinned(layer, lambda name, keep=i != 1: keep) for i, layer in enumerate(model.layers)]


def norms(model):
    return [pinned(layer, lambda name: "norm" in name) for layer in model.layers]


PLANS = [bare, one_role, first_and_last_layer, all_but_one_layer, norms]


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal_to_the_model_in_memory(family, dtype, models, paging):
    model = models(family, dtype=dtype)
    with in_memory(model) as expected, streamed(model) as actual:
        assert same(exercise(actual), exercise(expected))


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("n_splits", [1, 3])
def test_bit_equal_with_resident_tensors(n_splits, plan, n_slots, models, paging):
    model = models("llama", n_layers=5, n_splits=n_splits, dtype="Q8_0")
    with in_memory(model) as expected, streamed(model, plan(model), n_slots) as actual:
        assert same(exercise(actual), exercise(expected))


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the latter has two caches
def test_the_cache_takes_memory_as_it_is_used(family, models, paging):
    model = models(family, n_ctx=16384)
    options = {"max_context": 16384, "max_nodes": 8}
    tokens = np.random.default_rng(0).integers(3, 90, 700).tolist()
    with in_memory(model, **options) as expected, streamed(model, **options) as backend:
        whole = sum(n_bytes for _, n_bytes in backend._stream._caches)
        assert whole >= backend.kv_bytes / 2

        def taken():
            return resident_bytes(backend._stream._caches)

        assert taken() < whole / 20
        actual = own(backend).prefill(tokens)
        assert whole / 50 < taken() < whole / 4
        assert np.array_equal(actual, own(expected).prefill(tokens))
        assert same(exercise(backend), exercise(expected))


def resident_bytes(ranges):
    """Resident bytes of their whole pages, by mincore(2)."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    total = 0
    for address, n_bytes in ranges:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        n_pages = (address + n_bytes - start) // mmap.PAGESIZE
        pages = (ctypes.c_ubyte * n_pages)()
        assert libc.mincore(start, n_pages * mmap.PAGESIZE, pages) == 0
        total += mmap.PAGESIZE * sum(page & 1 for page in pages)
    return total


def test_layers_larger_than_huge_pages(models, paging):
    """Layers of several MiB move as huge pages and edges."""
    model = models("llama", n_layers=4, hidden=512, feed_forward=1792, dtype="F16")
    with in_memory(model) as expected, streamed(model, n_slots=3) as actual:
        assert same(exercise(actual), exercise(expected))


def test_a_pass_reads_every_streamed_layer_once(models, paging):
    model = models("llama", n_layers=6)
    with streamed(model) as backend:
        own(backend).prefill(PROMPT)
        before = backend.transfer_stats.bytes_streamed
        for _ in range(10):
            own(backend).extend([5], [PREFIX])
        one_pass = sum(layer.slot_bytes for layer in model.layers)
        read = backend.transfer_stats.bytes_streamed - before
        # Two slots are read ahead at either end.
        assert 9 * one_pass < read < 11 * one_pass


def test_target_and_draft_from_the_same_file(models, paging):
    model = models("llama")
    with streamed(model) as a, streamed(model) as b, in_memory(model) as expected:
        requested = exercise(expected)
        assert same(exercise(a), requested)
        assert same(exercise(b), requested)


def test_a_prompt_longer_than_a_batch(models, paging, monkeypatch):
    model = models("llama")
    with streamed(model) as whole:
        expected = own(whole).prefill(PROMPT)
    monkeypatch.setattr("backends.llama.context.PREFILL_TOKENS", 5)
    with streamed(model, max_nodes=3) as chunked:
        assert chunked.max_num_tokens == 5
        assert np.abs(own(chunked).prefill(PROMPT) - expected).max() < 1e-2
        assert own(chunked).n_committed == len(PROMPT)
        with pytest.raises(ContextFull):
            own(chunked).prefill(PROMPT * 5)
        assert own(chunked).n_committed == len(PROMPT)


def test_the_head_is_resident_and_an_embedding_alone_is_not(models):
    def names(family):
        return {record.name for record in models(family).resident_non_layer_records}

    assert names("llama") == {"output.weight", "output_norm.weight"}
    assert names("gemma") == {"token_embd.weight", "output_norm.weight"}
