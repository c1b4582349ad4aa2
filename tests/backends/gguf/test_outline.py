"""Outlines of known models against llama.cpp's own quantisation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from llama_quantize import llama_quantize

from backends.contract.backend import UnsupportedModel
from backends.contract.exactness import EXACT_OFF
from backends.contract.source import BackendOptions
from backends.gguf.exactness import ExactRun
from backends.gguf.outline import (
    F16,
    MXFP4,
    Q4_K_M,
    Q8_0,
    GgufSizes,
    LinearAttention,
    gguf_outline_bytes,
    write_gguf_outline,
)
from backends.llama.source import GgufSource
from offload.formats.gguf_index import GgufIndex
from specdec.planning.what_if.known_models import SIZES

DENSE = GgufSizes("qwen3", 256, 512, 19, 4, 2, 64, 512, 1024)
HYBRID = replace(
    DENSE, architecture="qwen35", num_hidden_layers=20, linear=LinearAttention(2, 4, 64)
)
KINDS = {
    "qwen3": DENSE,
    "llama-tied": replace(DENSE, architecture="llama", tie_word_embeddings=True),
    "mixture": replace(DENSE, architecture="qwen3moe", num_experts=4, num_experts_per_tok=2),
    "hybrid": HYBRID,
    "hybrid-mixture": replace(
        HYBRID,
        architecture="qwen35moe",
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=256,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file_type", [Q4_K_M, Q8_0])
def test_number_formats_are_those_that_llama_cpp_chooses(
    tmp_path: Path, kind: str, file_type: str
) -> None:
    """An outline in F16 is a model of zeros, which llama.cpp quantises."""
    floats, outline = tmp_path / "f16.gguf", tmp_path / "outline.gguf"
    write_gguf_outline(floats, KINDS[kind], F16)
    write_gguf_outline(outline, KINDS[kind], file_type)
    quantised = llama_quantize(floats, tmp_path / "quantised.gguf", file_type)
    expected = {r.name: (r.dtype, r.shape) for r in GgufIndex.from_path(quantised).values()}
    actual = {r.name: (r.dtype, r.shape) for r in GgufIndex.from_path(outline).values()}
    assert actual == expected


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.3-70B", 70.6),
        ("Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("Qwen3.8-27B", 26.9),
        ("Qwen3.6-35B-A3B", 34.7),
    ],
)
def test_known_models_have_the_parameters_that_their_makers_name(
    tmp_path: Path, name: str, billions: float
) -> None:
    path = tmp_path / "model.gguf"
    n_bytes = write_gguf_outline(path, SIZES[name], F16)
    assert n_bytes / 2e9 == pytest.approx(billions, rel=0.004)
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 12.1), ("gpt-oss-120b", 63.4)])
def test_gpt_oss_is_as_large_as_the_published_files(name: str, gigabytes: float) -> None:
    """Files of ggml-org on the hub, with experts in MXFP4."""
    assert gguf_outline_bytes(SIZES[name], MXFP4) / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize("file_type", [Q4_K_M, MXFP4])
def test_llama_cpp_opens_a_small_model_of_each_kind(tmp_path: Path, file_type: str) -> None:
    kinds = {"gpt-oss": SIZES["gpt-oss-20b"], **KINDS}
    for kind, sizes in kinds.items():
        if (file_type == MXFP4) == (kind == "gpt-oss"):
            path = tmp_path / f"{kind}.gguf"
            write_gguf_outline(path, sizes, file_type)
            source = GgufSource(path, BackendOptions(), ExactRun(EXACT_OFF, "f16", "f16"))
            assert (source.state_bytes(1, 1) > 0) == kind.startswith("hybrid")
            assert any(source.experts) == (sizes.num_experts > 0)


def test_without_gguf_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match=r"need gguf: pip install 'specdec-stream\[gguf\]'"):
        write_gguf_outline(tmp_path / "model.gguf", DENSE, Q8_0)
