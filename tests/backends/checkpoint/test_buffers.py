"""Buffers that a checkpoint holds are part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from alone import own
from checkpoints import VOCAB
from family_checks import PROMPT, TOLERANCE, reference_logits, scale
from safetensors.torch import load_file, save_file

from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from offload.formats.tensors import CheckpointError

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {
    **COMMON,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
KINDS = {
    "layer_scalar": transformers.Gemma4TextConfig(**GEMMA4),
    "act_fn.beta": transformers.ApertusConfig(**COMMON),
}


@pytest.mark.parametrize("buffer", KINDS)
def test_buffers_have_the_values_of_the_checkpoint(buffer: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(KINDS[buffer], dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.25, generator=generator)
    changed = [b for name, b in model.named_buffers() if name.endswith(buffer)]
    assert len(changed) == 2
    for i, item in enumerate(changed):
        item.mul_(0.4 + i)
    model.save_pretrained(tmp_path)
    expected = reference_logits(tmp_path, PROMPT)[-1]
    loaded = load_hf_model(tmp_path)
    with TorchBackend(loaded, CpuWeights(loaded, loaded.layer_weights, 2)) as backend:
        actual = own(backend).prefill(PROMPT)
    assert np.abs(actual - expected).max() <= TOLERANCE * scale(expected)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(buffer))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {name}: "):
        load_hf_model(tmp_path)
