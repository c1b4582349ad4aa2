"""Quantised checkpoints equal their dequantised form to the bit, or are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import save_tiny_checkpoint
from quantised_models import (
    awq,
    compressed,
    compressed_fp8,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    save_quantised,
)
from safetensors.torch import load_file, save_file

from backends.contract.backend import PREFIX, UnsupportedModel
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource
from backends.packed import groups, timing
from backends.shapes.hf import hf_shape
from backends.timing.measure import matrix_formats
from offload.errors import SpecdecError
from offload.formats.tensors import CheckpointError

TOLERANCE = 0.03
"""Sums in another order, rounded to bf16 or fp16 in each layer. Products themselves are compared to
the bit in tests/backends/packed/test_products.py."""
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
IN_EIGHTS = {**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "group_size": 8}}}}
ROWS = {**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "strategy": "channel"}}}}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def of_format(name: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors, with inputs that are quantised while running."""
    inputs = {"num_bits": weights["num_bits"], "type": "float", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"a": group}}


def fp8_by(strategy: str) -> dict[str, Any]:
    return of_format("float-quantized", num_bits=8, type="float", strategy=strategy)


NVFP4 = of_format(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
)
MXFP4 = of_format("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
BF16, F16 = torch.bfloat16, torch.float16
KINDS = {
    "fp8": (fp8(), FP8, BF16),
    "fp8 with bf16 scales": (fp8(BF16), FP8, BF16),
    "int4": (compressed(is_symmetric=True), INT4, BF16),
    "int4 with zeros": (compressed(is_symmetric=False), INT4, BF16),
    "int4 of whole rows": (compressed(is_symmetric=True, group=-1), ROWS, BF16),
    "gptq": (gptq(is_reordered=False), GPTQ, F16),
    "gptq in another order": (gptq(is_reordered=True), GPTQ, F16),
    "gptq that says so": (gptq(is_reordered=True), {**GPTQ, "desc_act": True}, F16),
    "int4 in groups of 8": (compressed(is_symmetric=False, group=8), IN_EIGHTS, BF16),
    "awq": (awq, AWQ, F16),
    "awq in bf16": (awq, AWQ, BF16),
    "fp8 by channel": (compressed_fp8("channel"), fp8_by("channel"), BF16),
    "fp8 by tensor": (compressed_fp8("tensor"), fp8_by("tensor"), BF16),
    "compressed fp8 by block": (compressed_fp8("block"), fp8_by("block"), BF16),
    "nvfp4": (nvfp4, NVFP4, BF16),
    "mxfp4": (mxfp4, MXFP4, BF16),
}


def logits(folder: Path, is_streamed: bool) -> list[np.ndarray]:
    """Logits of a prompt and a tree behind it."""
    model = load_hf_model(folder)
    layers = model.layer_weights
    if not is_streamed:
        layers = tuple(layer.with_resident(r.name for r in layer.tensors) for layer in layers)
    with TorchBackend(model, CpuWeights(model, layers, 2 * is_streamed)) as backend:
        return [
            own(backend).prefill([5, 9, 44, 3]),
            *own(backend).extend([7, 8], [PREFIX, PREFIX])[1],
        ]


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(tmp_path, *KINDS[kind])
    expected = logits(plain, is_streamed=False)
    assert all(np.isfinite(item).all() and item.any() for item in expected)
    for is_streamed in (False, True):
        for item, other in zip(logits(quantised, is_streamed), expected, strict=True):
            np.testing.assert_allclose(item, other, atol=TOLERANCE * float(np.abs(other).max()))


def test_fp8_is_dequantised_as_transformers_does() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weights = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    parts, decoded = fp8()(weights)
    theirs = Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=BF16)
    assert torch.equal(decoded.to(BF16), theirs)


def test_plans_and_shapes_know_the_stored_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, plain = save_quantised(tmp_path, *KINDS["int4"])
    own, other = (HfSource(path, BackendOptions()) for path in (quantised, plain))
    n_own, n_other = (sum(layer.n_bytes for layer in item.layers) for item in (own, other))
    assert n_own < n_other / 3
    assert own.non_layer_bytes > other.non_layer_bytes
    shapes = hf_shape(quantised), hf_shape(plain)
    stored = [sum(m.n_bytes for m in shape.layers[0].matrices) for shape in shapes]
    assert stored[0] < stored[1] / 3
    assert {m.number_format for m in shapes[0].layers[0].matrices} == {"BF16"}
    assert shapes[0].notes[0].startswith("21 matrices are stored as INT4_PACK_QUANTIZED: ")
    sizes = [sorted(r.n_bytes for r in item.multiplied) for item in (own, other)]
    assert sizes[0] == sizes[1]
    assert matrix_formats(own.multiplied) == ("BF16",)
    monkeypatch.setattr(timing, "_SHAPE", (128, 512))
    assert own.decode_seconds() > 0 == other.decode_seconds()


def with_weights(**changes: Any) -> dict[str, Any]:
    return {**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', and fp8, compressed-tensors, gptq"),
        ({"bits": 4}, "quantised as 'None'"),
        ({**FP8, "weight_block_size": "a\n" * 99}, "'fp8' with scales of blocks 'a\\na\\n"),
        ({**INT4, "transform_config": {"config_groups": {"u": {}}}}, "rotations of activations"),
        ({**GPTQ, "format": "gptq_v2"}, "format 'gptq_v2', not 'gptq'"),
        ({**AWQ, "version": None, "format": "gemv_fast"}, "format 'gemv_fast', not 'gemm'"),
        ({**AWQ, "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({**FP8, "weight_block_size": None}, "'fp8' with scales of blocks None, not [128, 128]"),
        (
            {**INT4, "format": "marlin-24"},
            "format 'marlin-24', none of 'pack-quantized'",
        ),
        ({**NVFP4, "format": "mxfp4-pack-quantized"}, "strategy 'tensor_group'"),
        (fp8_by("token"), "strategy 'token', not 'channel'"),
        ({**INT4, "config_groups": [1]}, "config_groups that are no table"),
        (with_weights(num_bits=8), "num_bits 8, not 4"),
        (with_weights(actorder="group"), "actorder 'group', not"),
        (
            {**INT4, "config_groups": {"a": {"weights": WEIGHTS, "input_activations": {"n": 8}}}},
            "activations that are quantised, too ('input_activations')",
        ),
        (
            {**INT4, "config_groups": {"a": {"weights": WEIGHTS, "output_activations": {"n": 8}}}},
            "activations that are quantised, too ('output_activations')",
        ),
        (
            {**INT4, "kv_cache_scheme": {"num_bits": 8}},
            "a KV cache that is quantised, too ('kv_cache_scheme')",
        ),
        ({**GPTQ, "bits": 8}, "8 bits, not 4"),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq_v2', not 'gptq'"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, "bits that differ among modules"),
        ({**AWQ, "version": "gemv"}, "version 'gemv', not 'gemm'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    settings: Any, named: str, checkpoint_factory: Any, tmp_path: Path
) -> None:
    for file in checkpoint_factory("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=re.escape(named)) as caught:
        load_hf_model(tmp_path)
    assert "\n" not in str(caught.value)


def damage(folder: Path, change: Any) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors, "model.layers.1.mlp.up_proj.")
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("gptq", lambda t, m: t.pop(m + "scales"), "lacks model.layers.1.mlp.up_proj.scales"),
        ("awq", lambda t, m: t.update({m + "scales": t[m + "scales"][:1, :8].clone()}), "scales"),
        ("int4", lambda t, m: t.update({m + "weight_scale": torch.ones(192, 7)}), "do not divide"),
        ("int4", lambda t, m: t.update({m + "weight_packed": torch.ones(9)}), "no matrix"),
        (
            "fp8",
            lambda t, m: t.update({m + "weight_scale_inv": torch.ones(3, 3)}),
            "its weight_scale_inv is F32[3, 3], not F32 or BF16[2, 1]",
        ),
        ("gptq in another order", lambda t, m: t[m + "g_idx"].fill_(99), "g_idx names a group"),
        (
            "gptq",
            lambda t, m: t.update({m + "weight": torch.ones(192, 64)}),
            "has both model.layers.1.mlp.up_proj.qweight and model.layers.1.mlp.up_proj.weight",
        ),
        (
            "fp8",
            lambda t, m: t.update({m + "weight": t[m + "weight"].to(torch.bfloat16)}),
            "up_proj.weight_scale_inv, and no quantised model.layers.1.mlp.up_proj.weight",
        ),
        (
            "gptq",
            lambda t, m: stored_whole(t, m, "qweight"),
            "and no quantised model.layers.1.mlp.up_proj.qweight that it is for",
        ),
        (
            "int4",
            lambda t, m: stored_whole(t, m, "weight_packed"),
            "and no quantised model.layers.1.mlp.up_proj.weight_packed that it is for",
        ),
    ],
)
def test_broken_tensors_are_refused(kind: str, change: Any, named: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(tmp_path, *KINDS[kind])
    damage(quantised, change)
    with pytest.raises(SpecdecError, match=re.escape(named)) as caught:
        logits(quantised, is_streamed=False)
    assert "\n" not in str(caught.value)


def stored_whole(tensors: dict[str, torch.Tensor], module: str, main: str) -> None:
    """Replace a quantised matrix by a plain one; its scales stay."""
    del tensors[module + main]
    tensors[module + "weight"] = torch.ones(192, 64)


def halved(tensors: dict[str, torch.Tensor], module: str, names: str) -> None:
    """Double the group size."""
    for name in names.split():
        tensors[module + name] = tensors[module + name][::2].clone()


@pytest.mark.parametrize(
    ("kind", "settings", "change", "named"),
    [
        ("gptq", GPTQ, lambda t, m: (halved(t, m, "scales qzeros"), t.pop(m + "g_idx")), "groups"),
        ("awq", AWQ, lambda t, m: halved(t, m, "scales qzeros"), "have 1 groups, and group_size"),
        (
            "int4",
            INT4,
            lambda t, m: t.update({m + "weight_scale": t[m + "weight_scale"][:, :1].clone()}),
            "rows of 64 weights have 1 groups, and group_size is 32",
        ),
        ("gptq", {**GPTQ, "group_size": "x"}, lambda *_: None, "group_size is 'x'"),
        (
            "gptq in another order",
            {**GPTQ, "desc_act": True},
            lambda t, m: t.pop(m + "g_idx"),
            "it has no g_idx, and desc_act says",
        ),
        (
            "int4 with zeros",
            with_weights(symmetric=False),
            lambda t, m: t.pop(m + "weight_zero_point"),
            "it has no weight_zero_point",
        ),
    ],
)
def test_parts_are_checked_against_the_config(
    kind: str, settings: Any, change: Any, named: str, tmp_path: Path
) -> None:
    """A mismatch would decode to other weights."""
    quantise, _, dtype = KINDS[kind]
    quantised, _ = save_quantised(tmp_path, quantise, settings, dtype)
    damage(quantised, change)
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        load_hf_model(quantised)
    assert "\n" not in str(caught.value)


def test_a_last_group_may_be_short_where_groups_are_listed() -> None:
    groups.check_group_sizes([128], 192, 2, is_in_order=False)
    groups.check_group_sizes([128], 64, 1)
    groups.check_group_sizes([-1], 64, 1)
    groups.check_group_sizes([64, 32], 192, 6)
    with pytest.raises(ValueError, match="rows of 192 weights have 2 groups"):
        groups.check_group_sizes([128], 192, 2)


def test_zeros_are_packed_by_eight(tmp_path: Path) -> None:
    quantised, _ = save_quantised(tmp_path, *KINDS["gptq"])

    def narrow(tensors: dict[str, torch.Tensor], module: str) -> None:
        for name in ("qweight", "scales"):
            tensors[module + name] = tensors[module + name][:, :188].clone()
        tensors[module + "qzeros"] = tensors[module + "qzeros"][:, :23].clone()

    damage(quantised, narrow)
    with pytest.raises(CheckpointError, match="188 outputs, and zeros are packed by 8"):
        load_hf_model(quantised)


def test_a_part_that_is_packed_itself_is_refused(tmp_path: Path) -> None:
    quantised, _ = save_quantised(tmp_path, *KINDS["int4"])
    name = "model.layers.1.mlp.up_proj.weight_scale"
    entry = {"scheme": "BF16_12", "dtype": "BF16", "shape": [192, 2]}
    (path,) = quantised.glob("*.safetensors")
    tensors = {**load_file(path), name: torch.zeros(64 + 1536, dtype=torch.uint8)}
    packed = json.dumps({"version": 1, "tensors": {name: entry}})
    save_file(tensors, path, metadata={"specdec.packed": packed})
    with pytest.raises(CheckpointError, match="is packed itself"):
        load_hf_model(quantised)


def test_quantised_modules_are_linear(tmp_path: Path) -> None:
    """GPT-2's square matrices would be transposed."""
    save_tiny_checkpoint("gpt2", tmp_path, n_embd=64)
    name = "transformer.h.1.attn.c_proj.weight"
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            parts, _ = gptq(is_reordered=False)(tensors.pop(name))
            module = name.removesuffix("weight")
            tensors |= {module + key: part.contiguous() for key, part in parts.items()}
            save_file(tensors, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    pinned = {
        tensor: path.name for path in tmp_path.glob("*.safetensors") for tensor in load_file(path)
    }
    index.write_text(json.dumps({"weight_map": pinned}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    with pytest.raises(UnsupportedModel, match=r"c_proj.weight is quantised, and of a Conv1D"):
        load_hf_model(tmp_path)
