"""Model properties from a GGUF header: layers, sizes, memory per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_bytes as gb
import pytest
from gguf_loading import load, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.contract.backend import UnsupportedModel
from backends.gguf.model import load_gguf_model
from offload.formats.gguf_index import GgufError


def hybrid_tensors(*kinds: str) -> dict:
    """Tensors of one layer for each of "attention", "ssm", "both", "linear", "conv"."""
    tensors = {"token_embd.weight": ("F32", (gb.VOCAB, gb.HIDDEN))}
    for i, kind in enumerate(kinds):
        if kind in ("attention", "both"):
            tensors |= gb.layer_tensors(i)
        if kind in ("ssm", "both", "linear"):
            tensors[f"blk.{i}.ssm_out.weight"] = ("F32", (4, 4))
        if kind == "linear":
            tensors[f"blk.{i}.attn_qkv.weight"] = ("F32", (4, 4))
            tensors[f"blk.{i}.attn_gate.weight"] = ("F32", (4, 4))
        if kind == "conv":
            tensors[f"blk.{i}.shortconv.conv.weight"] = ("F32", (4, 4))
    return tensors


# --- models that load ----------------------------------------------------------------------------


def test_a_dense_model(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert model.path == tmp_path / "m.gguf"
    assert (model.architecture, model.n_layers, model.hidden_size) == ("llama", 2, gb.HIDDEN)
    assert (model.vocab_size, model.max_context, model.n_experts) == (gb.VOCAB, 512, 0)
    assert not model.is_tied
    assert not model.is_recurrent
    assert model.sliding_window is None
    for i, layer in enumerate(model.layers):
        assert [r.name for r in layer.tensors] == list(gb.layer_tensors(i))
        assert layer.resident == frozenset()
    names = {r.name for r in model.non_layer_records}
    assert names == {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert model.mtp_records == ()
    # Every tensor has exactly one place.
    n_assigned = sum(len(layer.tensors) for layer in model.layers) + len(model.non_layer_records)
    assert n_assigned == len(model.index)
    # 2 layers x (key + value) x 2 heads of 16 x 2 bytes
    assert model.kv_bytes_per_token("f16", "f16") == 2 * 2 * 2 * 16 * 2


def test_tied_split_and_out_of_order(tmp_path: Path) -> None:
    tensors = gb.model_tensors(12, tied=True)
    tensors["rope_freqs.weight"] = ("F32", (8,))
    names = sorted(tensors)  # blk.10 before blk.2
    thirds = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    metadata = gb.model_metadata(block_count=("u32", 12))
    paths = gb.write_splits(tmp_path, metadata, thirds)
    model = load_gguf_model(paths[1])
    assert model.path == paths[0]
    assert model.is_tied
    assert model.n_layers == 12
    for i, layer in enumerate(model.layers):
        assert {r.name for r in layer.tensors} == set(gb.layer_tensors(i))
        assert {r.path for r in layer.tensors} == set(paths)
    assert "rope_freqs.weight" in {r.name for r in model.non_layer_records}


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    tensors = gb.model_tensors(3)
    tensors["blk.2.nextn.eh_proj.weight"] = ("F32", (4, 4))
    metadata = gb.model_metadata(
        "glm4", block_count=("u32", 3), nextn_predict_layers=("u32", 1),
        attention__head_count_kv=("[i32]", [4, 2, 1]),
    )  # fmt: skip
    model = load(tmp_path, metadata, tensors)
    assert model.n_layers == len(model.layers) == 2
    assert {r.name for r in model.mtp_records} == {
        *gb.layer_tensors(2),
        "blk.2.nextn.eh_proj.weight",
    }
    assert model.kv_bytes_per_token(flash_attention=True) == (4 + 2) * 16 * 2 * 2
    # The same model converted without these tensors.
    assert load(tmp_path, metadata, gb.model_tensors(2)).mtp_records == ()
    metadata["glm4.nextn_predict_layers"] = ("u32", 3)
    refused(tmp_path, "nextn_predict_layers of 3; 0 to 2 are accepted", metadata, tensors)


def test_experts_and_window(tmp_path: Path) -> None:
    counts = {"expert_count": ("u32", 8), "expert_used_count": ("u32", 2)}
    metadata = gb.model_metadata(**counts, attention__sliding_window=("u32", 128))
    model = load(tmp_path, metadata)
    assert (model.n_experts, model.n_experts_used, model.sliding_window) == (8, 2, 128)
    metadata = gb.model_metadata(attention__sliding_window=("u32", 0))
    assert load(tmp_path, metadata).sliding_window is None


def test_vocabulary_without_tokens(tmp_path: Path) -> None:
    metadata = gb.model_metadata()
    del metadata["tokenizer.ggml.tokens"]
    assert load(tmp_path, metadata).vocab_size == gb.VOCAB


# --- recurrent layers ----------------------------------------------------------------------------


def test_recurrent_and_hybrid_models(tmp_path: Path) -> None:
    mamba = gb.model_metadata(
        "mamba2", attention__head_count=("u32", 0), attention__head_count_kv=None
    )
    model = load(tmp_path, mamba, hybrid_tensors("ssm", "ssm"))
    assert model.is_recurrent
    assert model.kv_bytes_per_token() == 0

    four = {"block_count": ("u32", 4)}
    per_layer = 2 * 2 * 16 * 2
    for architecture in ("jamba", "somethingnew"):  # known by name, found by its tensors
        metadata = gb.model_metadata(architecture, **four)
        tensors = hybrid_tensors("attention", "ssm", "both", "conv")
        model = load(tmp_path, metadata, tensors)
        assert model.is_recurrent
        assert model.kv_bytes_per_token() == 2 * per_layer
    tensors = hybrid_tensors("linear", "linear", "linear", "attention")
    model = load(tmp_path, gb.model_metadata("qwen3next", **four), tensors)
    assert model.is_recurrent
    assert model.kv_bytes_per_token() == per_layer

    assert load(tmp_path, gb.model_metadata("lfm2")).is_recurrent  # by name alone

    for key in ("ssm.state_size", "wkv.head_size", "kda.head_dim"):
        metadata = gb.model_metadata("new", **{key.replace(".", "__"): ("u32", 16)})
        assert load(tmp_path, metadata).is_recurrent
        metadata = gb.model_metadata("new", **{key.replace(".", "__"): ("u32", 0)})
        assert not load(tmp_path, metadata).is_recurrent
    for flags in ([False, False], [False, True]):
        metadata = gb.model_metadata("new", attention__recurrent_layers=("[bool]", flags))
        assert load(tmp_path, metadata).is_recurrent == any(flags)


ANY_VALUE = st.one_of(
    st.tuples(st.just("u64"), st.integers(0, 2**64 - 1) | st.integers(0, 300)),
    st.tuples(st.just("i32"), st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 300)),
    st.tuples(st.just("f32"), st.floats(width=32)),
    st.tuples(st.just("str"), st.text(max_size=9)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("[i64]"), st.lists(st.integers(-9, 99) | st.just(2**62), max_size=3)),
    st.tuples(st.just("[str]"), st.lists(st.text(max_size=3), max_size=3)),
)
SOME_KEYS = st.sampled_from([
    "llama.block_count", "llama.context_length", "llama.embedding_length",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.attention.key_length_swa", "llama.attention.sliding_window",
    "llama.attention.sliding_window_pattern", "llama.attention.shared_kv_layers",
    "llama.nextn_predict_layers", "llama.expert_count", "llama.ssm.state_size",
    "llama.attention.causal", "llama.num_loops", "general.architecture", "general.type",
    "tokenizer.ggml.tokens", "split.count",
])  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(SOME_KEYS, ANY_VALUE, min_size=1, max_size=3))
def test_any_values_load_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, tuple[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.unlink(missing_ok=True)
    gb.write_model(path, gb.model_metadata() | changes)
    try:
        model = load_gguf_model(path)
    except (GgufError, UnsupportedModel) as error:
        message = str(error)
    else:
        # Whatever is accepted is consistent.
        message = ""
        assert len(model.layers) == model.n_layers
        assert 0 <= model.kv_bytes_per_token() < 2**40
        assert 1 <= model.max_context < 2**31
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))
