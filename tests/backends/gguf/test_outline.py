"""Outlines of known models against llama.cpp's own quantisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from llama_quantize import llama_quantize

from backends.gguf.outline import F16, Q4_K_M, Q8_0, GgufSizes, write_gguf_outline
from offload.formats.gguf_index import GgufIndex
from specdec.planning.what_if.known_models import SIZES

DENSE = GgufSizes("qwen3", 256, 512, 19, 4, 2, 64, 512, 1024)
KINDS = {
    "qwen3": DENSE,
    "llama-tied": replace(DENSE, architecture="llama", tie_word_embeddings=True),
    "mixture": replace(DENSE, architecture="qwen3moe", num_experts=4, num_experts_per_tok=2),
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
    [("Llama-3.1-8B", 8.03), ("Llama-3.3-70B", 70.6), ("Qwen3-32B", 32.8), ("Qwen3-30B-A3B", 30.5)],
)
def test_known_models_have_the_parameters_that_their_makers_name(
    tmp_path: Path, name: str, billions: float
) -> None:
    path = tmp_path / "model.gguf"
    n_bytes = write_gguf_outline(path, SIZES[name], F16)
    assert n_bytes / 2e9 == pytest.approx(billions, rel=0.004)
    assert path.stat().st_blocks * 512 < 1 << 20
