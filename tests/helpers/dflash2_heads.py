"""Tiny random DFlash 2 heads beside tiny targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints import VOCAB
from dflash_heads import save_dflash_head

TOP_K, TAPS, GROUP, RANK, HIDDEN = 4, 3, 8, 8, 32
_SECOND = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}


def save_dflash2_head(
    directory: Path,
    *,
    seed: int = 1,
    vocab_size: int = VOCAB,
    num_target_layers: int = 3,
    **changes: Any,
) -> Path:
    """Write a random fp32 head; changes: of its dflash_config."""
    import torch
    from safetensors.torch import load_file, save_file

    second = {**_SECOND, **changes}
    of_target = {"vocab_size": vocab_size, "num_target_layers": num_target_layers}
    save_dflash_head(directory, seed=seed, architectures=["DFlash2DraftModel"], **of_target)
    path = directory / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed + 1)

    def random(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    n_groups, rank = HIDDEN // GROUP, second["selector_rank"]
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            kernel = random(2, TAPS, HIDDEN)
            kernel[:, 0] += 1.0
            tensors[f"{name}.base_kernel"] = kernel
            tensors[f"{name}.kernel_projection.weight"] = random(2 * TAPS * n_groups, HIDDEN)
    selector = "candidate_selector"
    tensors[f"{selector}.predecessor_codebook"] = random(vocab_size, rank, scale=1.0)
    tensors[f"{selector}.successor_codebook"] = random(vocab_size, rank, scale=1.0)
    tensors[f"{selector}.hidden_projection.weight"] = random(rank, HIDDEN, scale=1.0)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["dflash_config"] |= second
    (directory / "config.json").write_text(json.dumps(config))
    return directory
