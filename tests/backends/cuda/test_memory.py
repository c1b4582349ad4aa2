"""GPU memory reserved besides the weights, against what is allocated."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import transformers
from alone import own
from checkpoints import FAMILIES
from device_talk import all_there, on_device
from hypothesis import given
from hypothesis import strategies as st

from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions
from backends.cuda.engine import CudaEngine, cuda_problem
from backends.cuda.memory import allocated_bytes, cache_bytes
from backends.cuda.source import HfGpuSource
from backends.hf.activations import activation_bytes
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource
from offload.units import GIB, MIB

MAX_NODES = 300


def segments_taken(n_bytes: int, n_tensors: int) -> int:
    """torch's allocator in a few lines: split the current segment, or request another."""
    n_bytes = max(512, -(-n_bytes // 512) * 512)
    taken = left = 0
    for _ in range(n_tensors):
        if n_bytes > left:
            if n_bytes <= MIB:
                left = 2 * MIB
            elif n_bytes < 10 * MIB:
                left = 20 * MIB
            else:
                left = -(-n_bytes // (2 * MIB)) * 2 * MIB
            taken += left
        left -= n_bytes
    return taken


@given(
    n_bytes=st.sampled_from([1, 512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1])
    | st.integers(1, 40 * MIB),
    n_tensors=st.integers(1, 50),
)
def test_tensors_take_whole_segments(n_bytes: int, n_tensors: int) -> None:
    assert allocated_bytes(n_bytes, n_tensors) == segments_taken(n_bytes, n_tensors)


def test_a_source_on_a_gpu_counts_what_the_allocator_rounds_up(checkpoint_factory) -> None:
    source = HfSource(checkpoint_factory("llama"), BackendOptions())
    gpu = HfGpuSource(source)
    for ctx_size in (100, 5000, 50_000):
        rows = -(-(ctx_size + 50) // 256) * 256
        assert gpu.kv_bytes(ctx_size, 50) >= rows * source.model.kv_bytes_per_token
        assert gpu.kv_bytes(ctx_size, 50) == cache_bytes(source.model, ctx_size + 50)
    # Logits leave a GPU as they are; the CPU makes a float32 copy.
    head = source.model.model.get_output_embeddings()
    many = torch.empty(100_000, head.weight.shape[1], device="meta")
    head.weight = torch.nn.Parameter(many)  # masks are small next to so many logits
    of_rows = [
        item.scratch_bytes(64, 128, 128) - item.scratch_bytes(64, 64, 64) for item in (source, gpu)
    ]
    assert of_rows[0] - of_rows[1] == pytest.approx(64 * 100_000 * 8, rel=0.1)


def test_the_logits_of_the_widest_pass_are_counted(checkpoint_factory) -> None:
    model = load_hf_model(checkpoint_factory("llama", max_position_embeddings=8192))
    for ctx_size in (64, 8192):
        few, many = (activation_bytes(model, ctx_size, n, on_gpu=True) for n in (1, 1024))
        assert many - few >= 1023 * model.vocab_size * model.dtype.itemsize


@pytest.mark.cuda
@pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or "")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "minicpm3"])
def test_a_gpu_takes_no_more_than_planned(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, values = FAMILIES[family]
    wide = {"max_position_embeddings": 4096, "hidden_size": 512, "num_attention_heads": 8}
    config = getattr(transformers, name)(**{**values, **wide})
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    with on_device(
        tmp_path, CudaEngine(4 * GIB), all_there,
        max_context=4096, max_nodes=MAX_NODES,
    ) as backend:  # fmt: skip
        own(backend).prefill([5])  # the KV cache, and library setup
        model, pinned = backend._model, torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        own(backend).prefill([5] * 3000)
        own(backend).extend([5] * 257, [PREFIX] * 257)
        taken = torch.cuda.max_memory_allocated() - pinned
        assert taken <= activation_bytes(model, 3000, MAX_NODES, on_gpu=True)
