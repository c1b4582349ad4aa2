"""Analysis and plans of hybrids: keys and values of attention layers alone, states per sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import HYBRIDS, in_dtype
from tiny_gguf_kinds import RECURRENT, REFUSED

from backends.hf.loading import load_hf_model
from backends.shapes.gguf import gguf_shape
from backends.shapes.hf import hf_shape
from offload.units import MIB
from specdec.analysis.analyze import analyze
from specdec.analysis.operators import ATTENTION, STATES, pass_work
from specdec.devices.this_machine import model_formats

TOKENS = 7


def cache_of(directory: Path) -> Any:
    """Return the cache that transformers itself fills with a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(5, 5 + TOKENS)[None], use_cache=True).past_key_values


def tensors_of(layer: Any, name: str) -> list[torch.Tensor]:
    stored = getattr(layer, name, None)
    stored = list(stored.values()) if isinstance(stored, dict) else [stored]
    return [x for x in stored if isinstance(x, torch.Tensor)]


def bytes_in(layer: Any, *names: str) -> int:
    return sum(x.nbytes for name in names for x in tensors_of(layer, name))


@pytest.mark.parametrize("family", HYBRIDS)
def test_bytes_are_those_of_transformers_cache(family: str, checkpoint_factory) -> None:
    directory = checkpoint_factory(family)
    shape, layers = hf_shape(directory), cache_of(directory).layers
    kv_bytes = sum(bytes_in(layer, "keys", "values") for layer in layers)
    assert shape.kv_bytes_per_token * TOKENS == kv_bytes
    # transformers keeps one more input of a convolution, which the next token does not see.
    states = sum(bytes_in(layer, "recurrent_states") for layer in layers)
    states += sum(x[..., 1:].nbytes for layer in layers for x in tensors_of(layer, "conv_states"))
    assert shape.state_bytes == states == load_hf_model(directory).state_bytes
    attends = sum(layer.attention is not None for layer in shape.layers)
    work = pass_work(shape, 4, 64, 1)
    assert work[ATTENTION].stored_bytes == 64 * shape.kv_bytes_per_token
    assert attends == sum(bytes_in(layer, "keys") > 0 for layer in layers)
    single, four = pass_work(shape, 1, 64, 1)[STATES], work[STATES]
    assert single.stored_bytes == four.stored_bytes == 2 * shape.state_bytes
    assert four.flops == 4 * single.flops > 0


@pytest.mark.parametrize("name", [n for n in RECURRENT if n not in REFUSED])
def test_bytes_of_gguf_states_are_llama_cpps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from tiny_gguf import save_tiny_architecture

    from backends.contract.source import BackendOptions
    from backends.llama.source import GgufSource

    path = save_tiny_architecture(name, tmp_path / "tiny.gguf")
    source = GgufSource(path, BackendOptions())
    shape, planned = gguf_shape(path), source.state_bytes(1, 1)
    # llama.cpp tells its states in MiB with two decimals; the plan has six of them.
    assert planned - 0.02 * MIB <= 6 * shape.state_bytes <= planned
    assert shape.state_bytes > 0
    n_kept = sum(layer.attention is not None for layer in shape.layers)
    assert n_kept == sum(kv.n_heads > 0 for kv in source.model.kv_shape.layers)
    assert pass_work(shape, 1, 64, 1)[STATES].flops > 0


def test_arithmetic_of_states_is_timed_in_their_own_format(
    checkpoint_factory, tmp_path: Path
) -> None:
    """Weights are bf16, states are not."""
    directory = in_dtype(checkpoint_factory("qwen3.5"), tmp_path, torch.bfloat16)
    assert analyze(directory).decode.seconds > 0
    assert set(hf_shape(directory).number_formats) <= set(model_formats(directory))
