"""The KV cache of llama.cpp: quantised formats, and layers with a sliding window."""

import numpy as np
import pytest
from alone import own
from gguf_models import save_tiny_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backends.contract.backend import PREFIX, BackendError
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend

pytestmark = pytest.mark.gguf

CONTEXT, MAX_NODES = 60, 20


def make_backend(model, **options):
    """Use a float32 cache and plain attention: their rounding is independent of a pass's rows."""
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False, **options}
    return LlamaBackend(
        model, max_context=CONTEXT, max_nodes=MAX_NODES, n_threads=1, load_mode="mmap", **options
    )


@pytest.mark.parametrize(
    ("cache_type_k", "cache_type_v"), [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q4_0")]
)
def test_quantized_cache(cache_type_k, cache_type_v, tmp_path):
    """Commit, prune and rollback move no cell: a row's values stay, bit for bit."""
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf"))
    options = {"cache_type_k": cache_type_k, "cache_type_v": cache_type_v, "flash_attention": None}
    with make_backend(model, **options) as backend:
        own(backend).prefill([3, 17, 5, 60, 41])
        ids, _ = own(backend).extend([7, 8, 9, 10], [PREFIX] * 4)
        _, before = own(backend).extend([20, 21], [ids[1], ids[3]])
        own(backend).prune([ids[0], ids[2]])
        own(backend).commit([ids[3]])
        _, after = own(backend).extend([21], [PREFIX])
        scale = max(1.0, float(np.abs(before).max()))
        assert np.abs(before[1] - after[0]).max() <= 2e-3 * scale
        own(backend).rollback(5)
        ids, _ = own(backend).extend([10], [PREFIX])
        _, again = own(backend).extend([21], ids)
        assert np.abs(before[1] - again[0]).max() <= 2e-3 * scale


def test_nodes_as_deep_as_the_window_are_refused(tmp_path):
    model = load_gguf_model(save_tiny_gguf("gemma2", tmp_path / "m.gguf", n_layers=2))
    with make_backend(model) as backend:
        window = backend._model.sliding_window
        own(backend).prefill([3, 17, 5])
        ids, _ = own(backend).extend([7] * (window - 1), [PREFIX, *range(window - 2)])
        with pytest.raises(BackendError, match="sliding window of 8: draft fewer tokens"):
            own(backend).extend([7], ids[-1:])
        assert own(backend).n_committed == 3
        assert not own(backend).store.table.ids
