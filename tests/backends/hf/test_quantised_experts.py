"""Mixtures whose experts are quantised: fetched as stored, and multiplied as dequantised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import save_tiny_checkpoint
from family_checks import (
    PROMPT,
    TOLERANCE,
    TREE_PARENTS,
    TREE_TOKENS,
    path_tokens,
    reference_logits,
    scale,
)
from quantised_models import (
    Quantise,
    compressed,
    compressed_fp8,
    fp8,
    gptq,
    mxfp4,
    save_quantised_experts,
)
from safetensors.torch import load_file, save_file

from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.expert_records import fetch_matrices
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource
from offload.errors import SpecdecError
from offload.placement.experts import ExpertCachePlan, count_experts

STACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def of_format(name: str, **weights: Any) -> dict[str, Any]:
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


INT4 = of_format("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
CHANNELS = of_format("float-quantized", num_bits=8, type="float", strategy="channel")
KINDS: dict[str, tuple[str, Quantise, dict[str, Any]]] = {
    "gpt-oss as published": ("gpt-oss", mxfp4, STACKED),
    "fp8": ("qwen3-moe", fp8(), FP8),
    "fp8 by channel": ("qwen3-moe", compressed_fp8("channel"), CHANNELS),
    "int4": ("qwen3-moe", compressed(is_symmetric=True), INT4),
    "gptq": ("qwen3-moe", gptq(is_reordered=False), GPTQ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def saved(kind: str, folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    family, quantise, settings = KINDS[kind]
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64}
    if family != "gpt-oss":
        sizes["moe_intermediate_size"] = 32
    save_tiny_checkpoint(family, folder / "float", **sizes)
    return save_quantised_experts(folder / "float", folder, quantise, settings, dtype)


def opened(directory: Path, n_slots: int | None = None) -> TorchBackend:
    model = load_hf_model(directory)
    plan = ExpertCachePlan(model.experts, n_slots or count_experts(model.experts))
    return TorchBackend(model, CpuWeights(model, model.layer_weights, 2, experts=plan))


@each_kind
def test_logits_are_those_of_transformers_on_dequantised_weights(kind: str, tmp_path: Path) -> None:
    """In float32, with all experts cached and with some evicted."""
    quantised, plain = saved(kind, tmp_path, torch.float32)
    for n_slots in (None, 4):
        with opened(quantised, n_slots) as backend:
            expected = reference_logits(plain, PROMPT)[-1]
            actual = own(backend).prefill(PROMPT)
            assert np.abs(actual - expected).max() <= TOLERANCE * scale(expected)
            first = own(backend).next_node_id
            parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
            _, logits = own(backend).extend(TREE_TOKENS, parents)
            for node, row in enumerate(logits):
                expected = reference_logits(plain, PROMPT + path_tokens(node))[-1]
                assert np.abs(row - expected).max() <= TOLERANCE * scale(expected)


def test_mxfp4_is_dequantised_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    parts, decoded = zip(*map(mxfp4, weights), strict=True)
    blocks = torch.stack([x["weight_packed"] for x in parts]).unflatten(2, (-1, 16))
    scales = torch.stack([x["weight_scale"] for x in parts])
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(torch.stack(decoded).transpose(1, 2), theirs)


@each_kind
def test_experts_are_read_in_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    quantised, plain = saved(kind, tmp_path, torch.bfloat16)
    own_model, other = load_hf_model(quantised), load_hf_model(plain)
    sizes = [
        sum(experts.n_bytes for experts in model.experts if experts is not None)
        for model in (own_model, other)
    ]
    assert sizes[0] < (0.6 if "fp8" in kind else 0.35) * sizes[1]
    assert own_model.decode_buffer_bytes(1) > 0 == other.decode_buffer_bytes(1)
    sources = [HfSource(path, BackendOptions()) for path in (quantised, plain)]
    multiplied = [sum(r.n_bytes for r in source.multiplied) for source in sources]
    assert multiplied[0] == multiplied[1]


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 33])
def test_an_expert_gives_a_row_the_same_bits_beside_any_others(
    num_tokens: int, tmp_path: Path
) -> None:
    quantised, _ = saved("gpt-oss as published", tmp_path, torch.bfloat16)
    tokens = [(7 * i + 3) % 60 for i in range(num_tokens)]
    with opened(quantised) as together, opened(quantised) as alone:
        matrices = together._model.expert_matrices
        assert matrices[0] is not None
        own(together).prefill(tokens)
        x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        rows = [outputs(backend, x[:num_tokens]) for backend in (together, alone)]
        single = torch.cat([outputs(alone, x[i : i + 1]) for i in range(num_tokens)])
    assert torch.equal(rows[0], single)
    assert torch.equal(rows[0], rows[1])


def outputs(backend: TorchBackend, x: torch.Tensor) -> torch.Tensor:
    """The first matrix of expert 1 of layer 0, for rows."""
    with torch.inference_mode():
        model = backend._model
        own = model.expert_matrices[0]
        assert own is not None
        fetched = fetch_matrices(backend._weights, model.dtype, 0, own, [1], None)
        for _, matrices in fetched:
            matrix = matrices[0]
            assert not isinstance(matrix, torch.Tensor)
            result = matrix.multiply(x, None)
        return result


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    del tensors[name]


def of_other_size(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name] = tensors[name][..., :1].clone()


def both(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name.removesuffix("_scales")] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_scales, "down_proj_scales, which"),
        (of_other_size, "down_proj_scales is U8"),
        (both, "which is meant?"),
    ],
)
def test_damaged_experts_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None], named: str, tmp_path: Path
) -> None:
    quantised, _ = saved("gpt-oss as published", tmp_path, torch.bfloat16)
    (path,) = quantised.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SpecdecError, match=re.escape(named)) as caught:
        load_hf_model(quantised)
    assert "\n" not in str(caught.value)
