"""Shapes from headers: FLOPs as torch counts them, and alike for both formats."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FAMILIES, save_tiny_checkpoint
from gguf_models import FEED_FORWARD, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, save_tiny_gguf
from torch.utils.flop_counter import FlopCounterMode

from backends.checkpoint.matching import match_config
from backends.checkpoint.skeleton import build_model
from backends.contract.backend import UnsupportedModel
from backends.shapes.gguf import gguf_shape
from backends.shapes.hf import hf_shape, shape_of
from backends.shapes.shape import FFN, ModelShape
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError
from specdec.analysis.operators import pass_work, total

ROOT = Path(__file__).resolve().parents[3]
DENSE = [name for name in FAMILIES if name != "minicpm3"]  # latent attention is approximated
NOT_COUNTED = {"gemma3n": 4 * 2 * 32 * (4 * 4 + 4)}
"""FLOPs of a token that shapes leave out: AltUp mixes 4 streams in each of 4 layers, and asks its
router once more."""
MIXTURE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MIXTURES = {
    "mixtral": ("MixtralConfig", {**MIXTURE, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MIXTURE, "num_experts": 4}),
}


def config_of(family: str, **overrides: Any) -> Any:
    name, values = {**FAMILIES, **MIXTURES}[family]
    wide = {"sliding_window": 64} if values.get("sliding_window") else {}
    return getattr(transformers, name)(**{**values, **wide, **overrides})


def counted_flops(model: torch.nn.Module, num_tokens: int, context: int) -> int:
    """FLOPs by torch for the last rows of a context, without position embeddings."""
    device = next(model.parameters()).device
    cache = transformers.DynamicCache()
    ids = torch.ones(1, context, dtype=torch.long, device=device)
    with torch.no_grad():
        if context > num_tokens:
            model(input_ids=ids[:, :-num_tokens], past_key_values=cache, use_cache=True)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids[:, -num_tokens:], past_key_values=cache, use_cache=True)
    counts = counter.get_flop_counts()
    rotary = sum(
        sum(ops.values()) for name, ops in counts.items() if name.split(".")[-1] == "rotary_emb"
    )
    return int(sum(counts["Global"].values())) - rotary


def shape_flops(shape: ModelShape, num_tokens: int, context: int) -> int:
    return total(pass_work(shape, num_tokens, context, num_tokens).values()).flops


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("family", DENSE)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    config = config_of(family)
    config._attn_implementation = "eager"
    model = build_model(config, torch.bfloat16)
    shape = shape_of(model, Path(family), match_config(model))
    meta = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    ).to("meta")
    for num_tokens, context in ((5, 20), (20, 20)):
        left_out = num_tokens * NOT_COUNTED.get(family, 0)
        expected = counted_flops(meta, num_tokens, context) - left_out
        assert shape_flops(shape, num_tokens, context) == expected


REAL = {
    "llama-2-7b": transformers.LlamaConfig(),
    "llama-3.2-1b": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "mistral-7b": transformers.MistralConfig(),
    "qwen2.5-7b": transformers.Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4,
    ),
}  # fmt: skip
"""Real models, with three feed-forward matrices."""


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("name", REAL)
def test_flops_of_real_models_are_those_that_torch_counts(name: str) -> None:
    """The meta device allocates nothing."""
    config = REAL[name]
    config._attn_implementation = "eager"
    model = build_model(config, torch.bfloat16)
    shape = shape_of(model, Path(name), match_config(model))
    with torch.device("meta"):
        meta = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
    for num_tokens, context in ((1, 512), (8, 512)):
        assert shape_flops(shape, num_tokens, context) == counted_flops(
            meta.eval(), num_tokens, context
        )


@pytest.mark.parametrize("family", MIXTURES)
def test_flops_of_a_mixture_are_those_of_the_active_experts(family: str) -> None:
    config = config_of(family)
    model = build_model(config, torch.float32)
    shape = shape_of(model, Path(family), match_config(model))
    real = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    real.set_experts_implementation("eager")
    for num_tokens in (1, 6):
        assert shape_flops(shape, num_tokens, 12) == counted_flops(real.eval(), num_tokens, 12)
    experts = [m for m in shape.layers[0].matrices if m.n_matrices > 1]
    assert {(m.role, m.n_matrices, m.n_active) for m in experts} == {(FFN, 4, 2)}


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(family, tmp_path / family)
    shape = hf_shape(directory)
    assert shape.weight_bytes == WeightIndex.from_directory(directory).total_bytes
    assert shape.number_formats == ("F32",)
    assert shape.notes == () or family == "minicpm3"


def test_a_config_alone_will_do(tmp_path: Path) -> None:
    whole = hf_shape(save_tiny_checkpoint("qwen3", tmp_path / "whole"))
    alone = tmp_path / "alone"
    alone.mkdir()
    values = json.loads((tmp_path / "whole" / "config.json").read_text())
    (alone / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    shape = hf_shape(alone)
    assert shape.weight_bytes == whole.weight_bytes // 2
    assert "no weights here: counted as BF16, which the config names" in shape.notes
    assert shape_flops(shape, 3, 9) == shape_flops(whole, 3, 9)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        hf_shape(tmp_path)


def test_windows_by_layer(tmp_path: Path) -> None:
    shape = hf_shape(save_tiny_checkpoint("gemma2", tmp_path / "gemma2"))
    assert [x.attention and x.attention.window for x in shape.layers] == [6, None, 6]
    full = hf_shape(save_tiny_checkpoint("qwen2", tmp_path / "qwen2"))
    assert [x.attention and x.attention.window for x in full.layers] == [None] * 3


# --- GGUF -------------------------------------------------------------------------------------

TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"head_dim": None}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8}),
    "phi3": ("Phi3Config", {"head_dim": None, "pad_token_id": 0, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.gguf
@pytest.mark.parametrize("family", TWINS)
def test_both_formats_of_a_model_count_alike(family: str, tmp_path: Path) -> None:
    name, more = TWINS[family]
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FEED_FORWARD,
        "head_dim": HEAD_DIM,
        **more,
    }
    config = getattr(transformers, name)(**{k: v for k, v in values.items() if v is not None})
    model = build_model(config, torch.float32)
    twin = shape_of(model, tmp_path, match_config(model))
    shape = gguf_shape(save_tiny_gguf(family, tmp_path / "model.gguf"))
    for num_tokens, context in ((1, 30), (4, 30)):
        here, there = (pass_work(item, num_tokens, context, num_tokens) for item in (shape, twin))
        assert list(here) == list(there)
        for operator, work in here.items():
            other = there[operator]
            assert (work.flops, work.stored_elements) == (other.flops, other.stored_elements)
            if family != "mixtral":  # gate and up are one tensor in one of the two
                assert (work.n_products, work.elements) == (other.n_products, other.elements)


@pytest.mark.gguf
def test_quantised_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    path = save_tiny_gguf("llama", tmp_path / "model.gguf", dtype="Q4_0")
    shape = gguf_shape(path, "q8_0", "f16")
    work = pass_work(shape, 1, 64, 1)
    assert work[FFN].stored_bytes == work[FFN].stored_elements * 18 // 32
    assert shape.number_formats == ("Q4_0", "Q8_0")
    kv_heads_bytes = KV_HEADS * (HEAD_DIM * 34 // 32 + HEAD_DIM * 2)
    assert shape.kv_bytes_per_token == 3 * kv_heads_bytes
    assert work["attention"].stored_bytes == 64 * shape.kv_bytes_per_token


@pytest.mark.gguf
def test_recurrent_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.shapes import gguf as module

    path = save_tiny_gguf("llama", tmp_path / "model.gguf")
    load = module.load_gguf_model
    monkeypatch.setattr(module, "load_gguf_model", lambda p: replace(load(p), is_recurrent=True))
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        gguf_shape(path)


@pytest.mark.gguf
def test_a_gguf_header_needs_neither_torch_nor_llama_cpp(tmp_path: Path) -> None:
    path = save_tiny_gguf("qwen3", tmp_path / "model.gguf")
    code = (
        "import sys\n"
        "from specdec.cli.app import main\n"
        f"assert main(['analyze', '-m', {str(path)!r}, '--on', 'laptop']) == 0\n"
        "print([m for m in ('torch', 'transformers', 'llama_cpp') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
