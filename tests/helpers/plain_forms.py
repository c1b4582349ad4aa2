"""The bf16 form of a checkpoint quantised by `specdec-bench synth`, by the plain formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.synth.layouts import LAYOUTS, Fp8Blocks

BLOCK = 128  # rows and columns of a block of fp8; the weights of a group of int4


def dequantise(folder: Path, out: Path) -> None:
    """Write the dequantised weights of `folder` to `out`, in the dtype of its config."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    layout = next(
        item for item in LAYOUTS.values() if item.config == {"quantization_config": settings}
    )
    is_fp8 = isinstance(layout.scheme, Fp8Blocks)
    stored = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    dtype = getattr(torch, config["dtype"])
    marker = "weight_scale_inv" if is_fp8 else "weight_packed"
    modules = {name.removesuffix(marker) for name in stored if name.endswith(marker)}
    names = ("weight", marker) if is_fp8 else (marker, "weight_scale", "weight_shape")
    plain = {}
    for module in modules:
        parts = [stored.pop(module + name) for name in names]
        plain[f"{module}weight"] = (fp8_weight if is_fp8 else int4_weight)(*parts).to(dtype)
    out.mkdir(parents=True)
    save_file(plain | stored, out / "model.safetensors", metadata={"format": "pt"})
    for path in folder.iterdir():
        if ".safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config))


def fp8_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    by_block = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * by_block


def int4_weight(packed: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Unpack int4 weights: the first of eight lies in the lowest bits of their int32."""
    pairs = packed.view(torch.uint8)
    values = torch.stack((pairs & 15, pairs >> 4), -1).view(len(packed), -1).bfloat16() - 8
    return values * scales.repeat_interleave(BLOCK, 1)
