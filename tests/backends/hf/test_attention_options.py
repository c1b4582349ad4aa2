"""Options in config.json unknown to the family change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from transformers import AutoModelForCausalLM

from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model

PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]


def with_options(source: Path, directory: Path, **options: Any) -> Path:
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **options}))
    return directory


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"sliding_window": 6}),
        ("llama", {"sliding_window": 6, "layer_types": ["sliding_attention"] * 3}),
        ("gpt-neox", {"sliding_window": 6}),
    ],
)
def test_windows_are_those_of_transformers(
    family: str, options: dict[str, Any], checkpoint_factory, tmp_path: Path
) -> None:
    directory = with_options(checkpoint_factory(family), tmp_path, **options)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1].numpy()
    with TorchBackend.resident(directory) as backend:
        difference = np.abs(own(backend).prefill(PROMPT) - expected).max()
    assert difference <= 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("family", ["gpt-neox", "bloom", "gpt2", "qwen2", "phi3"])
@pytest.mark.parametrize("options", [{"num_key_value_heads": 2}, {"kv_lora_rank": 4}])
def test_the_planned_kv_is_what_is_taken(
    family: str, options: dict[str, Any], checkpoint_factory, tmp_path: Path
) -> None:
    directory = with_options(checkpoint_factory(family), tmp_path, **options)
    with TorchBackend.resident(directory) as backend:
        own(backend).prefill(PROMPT)
        planned = load_hf_model(directory).kv_bytes_per_token
        assert backend.kv_bytes == planned * backend.n_kv_allocated
