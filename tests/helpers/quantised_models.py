"""Tiny quantised checkpoints, written as other libraries write them, and dequantised forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_tiny_checkpoint
from safetensors.torch import load_file, save_file

GROUP = 32
Quantise = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""A function from a matrix to (its parts by suffix, the dequantised matrix)."""


def save_quantised(
    folder: Path, quantise: Quantise, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[Path, Path]:
    """Write (quantised, plain): two checkpoints with equal results."""
    plain, quantised = folder / "plain", folder / "quantised"
    save_tiny_checkpoint("llama", folder / "float", hidden_size=64, intermediate_size=192)
    decoded, stored = {}, {}
    for path in (folder / "float").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            decoded[name] = stored[name] = tensor.to(dtype)
            if "layers" in name and "norm" not in name:
                parts, decoded[name] = quantise(tensor)
                del stored[name]
                module = name.removesuffix("weight")
                stored |= {module + key: part.contiguous() for key, part in parts.items()}
    config = json.loads((folder / "float" / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    for item, tensors in ((plain, decoded), (quantised, stored)):
        item.mkdir()
        save_file(tensors, item / "model.safetensors", metadata={"format": "pt"})
        (item / "config.json").write_text(json.dumps(config))
        config["quantization_config"] = settings
    return quantised, plain


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Pack numbers below 16 [rows, n] into int32 [rows, n / 8], the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    words = (values.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return words.to(torch.int32)


def rounded(
    weights: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (numbers from 0 to 15 [n_out, n_in], zeros and scales [n_out, groups])."""
    grouped = weights.float().unflatten(1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    actual = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return actual.flatten(1).to(torch.int32), zeros.to(torch.int32), scales


def dequantised(
    values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Dequantise a matrix; `groups` has the group of each column."""
    whole = (values - zeros[:, groups]).to(scales.dtype)
    return whole * scales[:, groups]


def in_order(n_in: int, group: int = GROUP) -> torch.Tensor:
    return torch.arange(n_in) // group


def fp8(scales: torch.dtype = torch.float32) -> Quantise:
    def quantise(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        n_out, n_in = weights.shape
        rows, columns = torch.arange(n_out) // 128, torch.arange(n_in) // 128
        scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for i in range(len(scale)):
            for j in range(scale.shape[1]):
                block = weights[rows == i][:, columns == j]
                scale[i, j] = block.abs().max() / 448
        scale = scale.to(scales)
        whole = scale.float()[rows][:, columns]
        stored = (weights.float() / whole).to(torch.float8_e4m3fn)
        decoded = (stored.float() * whole).to(torch.bfloat16)
        return {"weight": stored, "weight_scale_inv": scale}, decoded

    return quantise


def compressed(is_symmetric: bool, group: int = GROUP) -> Quantise:
    def quantise(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size = weights.shape[1] if group == -1 else group
        values, zeros, scales = rounded(weights, size, torch.bfloat16)
        zeros = torch.full_like(zeros, 8) if is_symmetric else zeros
        parts = {
            "weight_packed": words_of(values),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weights.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = words_of(zeros.T).T
        return parts, dequantised(values, zeros, scales, in_order(weights.shape[1], size))

    return quantise


def gptq(is_reordered: bool) -> Quantise:
    def quantise(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        n_in = weights.shape[1]
        order = in_order(n_in)
        if is_reordered:
            order = order[torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in))]
        values, zeros, scales = rounded(weights, GROUP, torch.float16)
        parts = {
            "qweight": words_of(values).T,
            "qzeros": words_of((zeros - 1 & 15).T),
            "scales": scales.T,
            "g_idx": order.to(torch.int32),
        }
        return parts, dequantised(values, zeros, scales, order)

    return quantise


def awq(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, zeros, scales = rounded(weights, GROUP, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: torch.Tensor) -> torch.Tensor:
        return words_of(numbers.unflatten(1, (-1, 8))[..., order].flatten(1))

    parts = {"qweight": words(values.T), "qzeros": words(zeros.T), "scales": scales.T}
    return parts, dequantised(values, zeros, scales, in_order(weights.shape[1]))
