"""Saved KV of llama.cpp: forged files are refused, or give a valid cache."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from alone import own
from gguf_models import save_tiny_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backends.contract.backend import PREFIX, BackendError
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend
from offload.formats.mapped import TensorShape

pytestmark = pytest.mark.gguf
TEXT = [3, 4, 5, 6, 7]
# Counts, positions, types and row sizes: everything in the file except key values.
STRUCTURE = [*range(0, 92, 4), 736, 740, 744]
VALUES = [0, 1, 2, 5, 6, 255, 2**31 - 1, 2**31, 2**32 - 1]


def save(backend: LlamaBackend) -> bytes:
    (tensor,) = own(backend).prefix_tensors()
    buffer = bytearray(tensor.n_bytes)
    own(backend).save_prefix({tensor.name: memoryview(buffer)})
    return bytes(buffer)


def load(backend: LlamaBackend, saved: bytes) -> None:
    tensor = TensorShape("sequence", "U8", (len(saved),))
    own(backend).load_prefix(TEXT, {"sequence": (tensor, memoryview(bytearray(saved)))})


@pytest.mark.parametrize(
    "options",
    [{}, {"flash_attention": False}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}],
    ids=["f16", "transposed", "q8_0"],
)
def test_live_nodes_are_not_saved(options: dict[str, object], tmp_path: Path) -> None:
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=2))
    common = {"max_context": 60, "max_nodes": 20, "n_threads": 1, "load_mode": "mmap", **options}
    with LlamaBackend(model, **common) as backend, LlamaBackend(model, **common) as other:
        own(backend).prefill(TEXT[:3])
        ids, _ = own(backend).extend([*TEXT[3:], 9, 10], [PREFIX, 0, 0, PREFIX])
        own(backend).commit(ids[:2], keep=[])
        own(backend).extend([11, 12], [PREFIX, PREFIX])
        load(other, save(backend))
        assert list(own(other).committed_ids) == TEXT
        expected, actual = (own(b).extend([20], [PREFIX])[1] for b in (backend, other))
        assert np.abs(expected - actual).max() < 2e-3 * max(1.0, float(np.abs(expected).max()))
        own(other).rollback(2)
        assert list(own(other).committed_ids) == TEXT[:2]
        own(other).prefill(TEXT[2:])


def test_what_is_changed_is_refused_or_loaded(tmp_path: Path) -> None:
    rng = random.Random(0)
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=2))
    with LlamaBackend(model, max_context=60, max_nodes=20, n_threads=1, load_mode="mmap") as item:
        expected = own(item).prefill(TEXT)
        saved, n_refused = save(item), 0
        for at in STRUCTURE:
            for value in [*VALUES, rng.getrandbits(32)]:
                changed = bytearray(saved)
                changed[at : at + 4] = struct.pack("<I", value)
                try:
                    load(item, bytes(changed))
                except BackendError:
                    n_refused += 1
                    assert own(item).n_committed == 0
                else:
                    own(item).extend([9], [PREFIX])
        assert n_refused > 150
        for n_bytes in (0, 7, 20, len(saved) - 1, len(saved) + 1):
            with pytest.raises(BackendError, match="the saved KV is not"):
                load(item, saved[:n_bytes].ljust(n_bytes, b"\0"))
        own(item).rollback(0)
        assert np.array_equal(own(item).prefill(TEXT), expected)
