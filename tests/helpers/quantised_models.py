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
                parts, matrix = quantise(tensor)
                decoded[name] = matrix.to(dtype)
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
        return {"weight": stored, "weight_scale_inv": scale}, stored.float() * whole

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


def compressed_fp8(strategy: str) -> Quantise:
    """strategy: "channel", "tensor" or "block"."""

    def quantise(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if strategy == "block":
            parts, decoded = fp8(torch.bfloat16)(weights)
            scales = parts["weight_scale_inv"]
            return {"weight": parts["weight"], "weight_scale": scales}, decoded.to(torch.bfloat16)
        dim = 1 if strategy == "channel" else (0, 1)
        scale = (weights.float().abs().amax(dim, keepdim=True) / 448).to(torch.bfloat16)
        stored = (weights.float() / scale.float()).to(torch.float8_e4m3fn)
        decoded = stored.to(torch.bfloat16) * scale
        return {"weight": stored, "weight_scale": scale if strategy == "channel" else scale[0]}, (
            decoded
        )

    return quantise


VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def float4_codes(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes [n_out, n_in] next to weights [n_out, n_in] divided by scales [n_out,
    groups]."""
    scaled = weights.float().unflatten(1, (scales.shape[1], -1)) / scales[..., None]
    codes = (scaled.abs()[..., None] - VALUES).abs().argmin(-1)
    return (codes + 8 * (scaled < 0)).flatten(1)


def float4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.cat([VALUES, -VALUES])[codes]
    return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def pairs_of(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def nvfp4(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    highest = weights.float().unflatten(1, (-1, 16)).abs().amax(-1)
    whole = (448 * 6 / highest.max()).view(1)
    stored = (highest / 6 * whole).to(torch.float8_e4m3fn)
    scales = stored.float() / whole
    codes = float4_codes(weights, scales.clamp(min=1e-9))
    parts = {"weight_packed": pairs_of(codes), "weight_scale": stored}
    return {**parts, "weight_global_scale": whole}, float4_values(codes, scales)


def mxfp4(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    highest = weights.float().unflatten(1, (-1, 32)).abs().amax(-1)
    exponents = (torch.log2(highest.clamp(min=1e-9)).floor() - 2).clamp(-127, 127)
    scales = torch.exp2(exponents)
    codes = float4_codes(weights, scales)
    stored = (exponents + 127).to(torch.uint8)
    decoded = float4_values(codes, scales).to(torch.bfloat16)
    return {"weight_packed": pairs_of(codes), "weight_scale": stored}, decoded


def save_quantised_experts(
    directory: Path, folder: Path, quantise: Quantise, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[Path, Path]:
    """Write (quantised, plain) of a mixture: the matrices of its experts are quantised, those that
    lie in one tensor (gpt-oss) as `NAME_blocks` and `NAME_scales`."""
    plain, quantised = folder / "plain", folder / "quantised"
    decoded, stored = {}, {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            decoded[name] = stored[name] = tensor.to(dtype)
            if ".experts." not in name or "bias" in name:
                continue
            del stored[name]
            if tensor.ndim == 3:
                experts = [quantise(expert.T) for expert in tensor]
                decoded[name] = torch.stack([x.T for _, x in experts]).to(dtype).contiguous()
                blocks = torch.stack([parts["weight_packed"] for parts, _ in experts])
                stored[name + "_blocks"] = blocks.unflatten(2, (-1, 16)).contiguous()
                stored[name + "_scales"] = torch.stack([x["weight_scale"] for x, _ in experts])
                continue
            parts, matrix = quantise(tensor)
            decoded[name] = matrix.to(dtype)
            module = name.removesuffix("weight")
            stored |= {module + key: part.contiguous() for key, part in parts.items()}
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    for item, tensors in ((plain, decoded), (quantised, stored)):
        item.mkdir()
        save_file(tensors, item / "model.safetensors", metadata={"format": "pt"})
        (item / "config.json").write_text(json.dumps(config))
        config["quantization_config"] = settings
    return quantised, plain
