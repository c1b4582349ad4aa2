"""Options that a model cannot be loaded with."""

from __future__ import annotations

from pathlib import Path

import gguf_bytes as gb
import pytest

from backends.contract.backend import UnsupportedModel
from backends.gguf.model import load_gguf_model
from backends.llama.context import ContextOptions
from backends.llama.loading import check_options


def test_a_cache_for_several_sequences_leaves_each_its_rotary_factors(tmp_path: Path) -> None:
    """llama.cpp uses the factors for long contexts if the cache has more cells."""
    tensors = gb.model_tensors() | {"rope_factors_long.weight": ("F32", (8,))}
    metadata = gb.model_metadata(
        context_length=("u32", 8192), rope__scaling__original_context_length=("u32", 1024)
    )
    model = load_gguf_model(gb.write_model(tmp_path / "m.gguf", metadata, tensors))
    check_options(model, ContextOptions(512, 16), None, "mmap")
    check_options(model, ContextOptions(512, 16, num_kv_slots=1024), None, "mmap")
    check_options(model, ContextOptions(2048, 16, num_kv_slots=4096), None, "mmap")
    with pytest.raises(UnsupportedModel, match="more than 1024 tokens, and 1280 are needed"):
        check_options(model, ContextOptions(512, 16, num_kv_slots=1025), None, "mmap")
