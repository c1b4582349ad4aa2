"""Tiny checkpoints in bf16 that are large enough to be packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from alone import own
from checkpoints import save_tiny_checkpoint
from safetensors.torch import load_file, save_file

from backends.contract.backend import PREFIX
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model

_SIZES: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 64},
    "bloom": {"hidden_size": 64},
}
PACKABLE: dict[str, object] = {"hidden_size": 64, "intermediate_size": 128}


def save_packable(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: object
) -> Path:
    """Write a checkpoint whose matrices are worth packing."""
    save_tiny_checkpoint(family, folder, **{**_SIZES.get(family, PACKABLE), **sizes})
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(folder: Path, is_streamed: bool) -> list[np.ndarray]:
    """Return the logits of a prompt, a tree, and a token after it."""
    model = load_hf_model(folder)
    layers = model.layer_weights
    if not is_streamed:
        layers = tuple(layer.with_resident(r.name for r in layer.tensors) for layer in layers)
    with TorchBackend(model, CpuWeights(model, layers, 2 * is_streamed)) as backend:
        actual = [own(backend).prefill([5, 9, 44, 3])]
        ids, rows = own(backend).extend([7, 8, 9], [PREFIX, PREFIX, PREFIX])
        own(backend).commit(ids[:1])
        return [*actual, *rows, *own(backend).extend([11], [PREFIX])[1]]


def change_tensors(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
