"""Planned activation memory against torch's allocations."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from alone import own
from checkpoints import FAMILIES, MIXTURES
from torch.profiler import ProfilerActivity, profile

from backends.attention.stored_rows import kv_formats
from backends.contract.source import BackendOptions
from backends.hf.activations import activation_bytes
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from backends.hf.self_test import TorchExactness
from backends.hf.source import HfSource

N_TOKENS = 1030  # several chunks, the last one short
MAX_OVER = 1.4
_WIDE: dict[str, object] = {
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "num_attention_heads": 8,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama": {**_WIDE, "num_key_value_heads": 2, "head_dim": 32},
    "gemma2": {**_WIDE, "num_key_value_heads": 2, "head_dim": 32},  # eager attention
    "bloom": {"hidden_size": 256, "n_head": 8},  # attention code of its own
    "minicpm3": {**_WIDE, "qk_nope_head_dim": 16, "v_head_dim": 16},  # keys wider than values
    "gpt-neox": _WIDE,
    "qwen2": {**_WIDE, "num_key_value_heads": 2},
    "phi3": {**_WIDE, "num_key_value_heads": 2},
    "qwen3-moe": {**_WIDE, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64},
    "deepseek-v3": {**_WIDE, "moe_intermediate_size": 64},
}


def peak_bytes(backend: TorchBackend, token_ids: list[int]) -> int:
    """Peak bytes of torch during a prefill; the KV cache is not from torch."""
    gc.collect()  # memory freed meanwhile would hide usage
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        own(backend).prefill(token_ids)
    pinned = limit = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            pinned += event.nbytes()
            limit = max(limit, pinned)
    return limit


def _saved(family: str, shape: dict[str, object], dtype: torch.dtype, folder: Path) -> Path:
    name, values = (FAMILIES | MIXTURES)[family]
    config = getattr(transformers, name)(**{**values, **shape})
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("cache_type", [None, "q8_0", "fp8"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_planned_bytes_cover_what_a_prompt_takes(
    family: str, dtype: torch.dtype, cache_type: str | None, tmp_path: Path
) -> None:
    model = load_hf_model(_saved(family, SHAPES[family], dtype, tmp_path))
    model = replace(model, kv_formats=kv_formats(cache_type, cache_type))
    planned = activation_bytes(model, N_TOKENS, 1)
    with TorchBackend.kept_in_memory(model, max_context=4096) as backend:
        needed = peak_bytes(backend, [5 + i % 80 for i in range(N_TOKENS)])
    print(family, dtype, cache_type, "RATIO", planned / needed, planned, needed)
    assert needed <= planned
    assert planned <= MAX_OVER * needed


def test_the_last_norm_of_a_long_prompt_is_planned_for(tmp_path: Path) -> None:
    # Its float32 copies are larger than all that a layer of narrow attention takes.
    wide = {"hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    narrow = {"head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 16_384}
    model = load_hf_model(_saved("llama", {**wide, **narrow}, torch.bfloat16, tmp_path))
    with TorchBackend.kept_in_memory(model, max_context=16_384) as backend:
        needed = peak_bytes(backend, [5 + i % 80 for i in range(12_000)])
    assert needed <= activation_bytes(model, 12_000, 1)


def test_logits_of_padding_rows_are_planned_for(checkpoint_factory) -> None:
    source = HfSource(checkpoint_factory("llama", vocab_size=50_000), BackendOptions(is_exact=True))
    source.exactness = TorchExactness(True, min_batch_tokens=32)
    with TorchBackend.kept_in_memory(source.model, exactness=source.exactness) as backend:
        needed = peak_bytes(backend, [5, 6, 7])
    assert needed <= source.scratch_bytes(3, 1, 1)
