"""Names and tokenizers of a GGUF file written from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.synth.gguf_file import gguf_name
from bench.synth.gguf_metadata import add_tokenizer
from bench.synth.shapes import SynthError
from specdec.pair import pair_path

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"add_prefix_space":false', '"add_prefix_space":true', "no space is put before"),
        ('"normalizer":null', '"normalizer":{"type":"NFC"}', "no normalizer"),
        ('"type":"BPE"', '"type":"Unigram"', "the model is BPE"),
        ('"ignore_merges":false', '"ignore_merges":true', "not looked up whole"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, old: str, new: str, rule: str) -> None:
    text = json.dumps(
        json.loads((pair_path("pair:target") / "tokenizer.json").read_text()),
        separators=(",", ":"),
    )
    assert old in text
    (tmp_path / "tokenizer.json").write_text(text.replace(old, new, 1))
    with pytest.raises(SynthError, match=rule):
        add_tokenizer(gguf.GGUFWriter(None, "llama"), tmp_path, 4096)


@pytest.mark.parametrize(
    ("name", "model_type", "expected"),
    [
        ("model.embed_tokens.weight", "llama", "token_embd.weight"),
        ("model.norm.weight", "llama", "output_norm.weight"),
        ("lm_head.weight", "qwen3_moe", "output.weight"),
        ("model.layers.3.self_attn.q_proj.weight", "llama", "blk.3.attn_q.weight"),
        ("model.layers.3.mlp.down_proj.weight", "llama", "blk.3.ffn_down.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "llama", "blk.3.ffn_norm.weight"),
        ("model.layers.12.self_attn.k_norm.weight", "qwen3_moe", "blk.12.attn_k_norm.weight"),
        ("model.layers.12.mlp.gate.weight", "qwen3_moe", "blk.12.ffn_gate_inp.weight"),
        (
            "model.layers.12.mlp.experts.7.down_proj.weight",
            "qwen3_moe",
            "blk.12.ffn_down_exps.weight",
        ),
    ],
)
def test_names_are_llama_cpps(name: str, model_type: str, expected: str) -> None:
    assert gguf_name(name, model_type, 13) == expected


@pytest.mark.parametrize("name", ["model.layers.13.mlp.up_proj.weight", "visual.proj.weight"])
def test_strange_tensors_are_refused(name: str) -> None:
    with pytest.raises(SynthError, match="no part of a plain llama"):
        gguf_name(name, "llama", 13)
