"""Tiny checkpoints in bf16 that are large enough to be packed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import save_tiny_checkpoint
from safetensors.torch import load_file, save_file

_SIZES: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 64},
    "bloom": {"hidden_size": 64},
}
PACKABLE: dict[str, object] = {"hidden_size": 64, "intermediate_size": 128}


def save_packable(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: object
) -> Path:
    """A checkpoint whose matrices are worth packing."""
    save_tiny_checkpoint(family, folder, **_SIZES.get(family, PACKABLE), **sizes)
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
