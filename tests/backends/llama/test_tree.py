"""Memory of the KV cache by a GGUF header, by hand and against what llama.cpp allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_bytes as gb
import pytest

from backends.gguf.hparams import KvLayer, KvShape
from backends.gguf.model import GgufModel, load_gguf_model
from offload.formats.gguf_index import GgufError


def load(folder: Path, metadata: dict | None = None) -> GgufModel:
    return load_gguf_model(gb.write_model(folder / "m.gguf", metadata))


SIZES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


@pytest.mark.parametrize("type_k", SIZES)
@pytest.mark.parametrize("type_v", SIZES)
def test_cache_types(tmp_path: Path, type_k: str, type_v: str) -> None:
    metadata = gb.model_metadata(
        attention__key_length=("u32", 64), attention__value_length=("u32", 96)
    )
    model = load(tmp_path, metadata)
    for flash_attention in (False, True):
        n_bytes = model.kv_bytes_per_token(type_k, type_v, flash_attention=flash_attention)
        assert n_bytes == 2 * 2 * (64 * SIZES[type_k] + 96 * SIZES[type_v])


def test_the_13b_shape_of_the_documentation() -> None:
    shape = KvShape((KvLayer(40, 128, 128),) * 40)
    assert shape.bytes_per_token("f16", "f16") * 4096 == 3.125 * 2**30


def test_layers_of_unequal_width() -> None:
    shape = KvShape((KvLayer(4, 64, 64), KvLayer(1, 64, 32), KvLayer(2, 64, 0, 128)))
    keys = 2 * (4 * 64 + 64 + 2 * 64 + 128)
    assert shape.bytes_per_token("f16", "f16", flash_attention=True) == keys + 2 * (256 + 32)
    assert shape.bytes_per_token("f16", "f16") == keys + 2 * (256 + 256)  # transposed: the widest
    assert shape.bytes_per_token("f16", "q8_0") == keys + (256 + 32) * 34 // 32
    assert KvShape().bytes_per_token("f16", "f16") == 0


def test_head_sizes_that_blocks_do_not_fit(tmp_path: Path) -> None:
    model = load(tmp_path)  # heads of 16
    for types in (("q8_0", "f16"), ("f16", "q4_0")):
        with pytest.raises(GgufError, match=r"KV cache of q._0 cannot hold heads of length 16"):
            model.kv_bytes_per_token(*types)
    with pytest.raises(ValueError, match="'q9' is no KV cache type"):
        model.kv_bytes_per_token("f16", "q9")


def test_kv_of_special_kinds(tmp_path: Path) -> None:
    def layers(**changes: Any) -> list[tuple[int, int, int, int]]:
        shape = load(tmp_path, gb.model_metadata(**changes)).kv_shape
        return [(x.n_heads, x.key_length, x.value_length, x.index_length) for x in shape.layers]

    assert layers(attention__head_count_kv=None) == [(4, 16, 16, 0)] * 2
    kv = ("[u32]", [4, 0])
    assert layers(attention__head_count_kv=kv) == [(4, 16, 16, 0), (0, 16, 16, 0)]
    # Head counts by layer; the size comes from the first that has heads.
    per_layer = {"attention__head_count": ("[i32]", [0, 8]), "attention__head_count_kv": None}
    assert layers(**per_layer) == [(0, 8, 8, 0), (8, 8, 8, 0)]
    # Multi-head latent attention: one compressed key, no value.
    latent = {
        "attention__key_length": ("u32", 576), "attention__value_length": ("u32", 512),
        "attention__head_count_kv": ("u32", 1),
    }  # fmt: skip
    assert layers(**latent) == [(1, 576, 512, 0)] * 2
    latent["attention__key_length_mla"] = ("u32", 192)
    assert layers(**latent) == [(1, 576, 0, 0)] * 2
    latent["attention__indexer__key_length"] = ("u32", 128)
    assert layers(**latent) == [(1, 576, 0, 128)] * 2
    # Heads of other lengths in windowed layers, and layers that share a cache.
    swa = {
        "attention__key_length": ("u32", 32), "attention__value_length": ("u32", 32),
        "attention__key_length_swa": ("u32", 8), "attention__value_length_swa": ("u32", 64),
    }  # fmt: skip
    assert layers(**swa) == [(2, 32, 64, 0)] * 2
    swa["attention__sliding_window_pattern"] = ("[bool]", [True, False])
    assert layers(**swa) == [(2, 8, 64, 0), (2, 32, 32, 0)]
    assert layers(attention__shared_kv_layers=("u32", 1)) == [(2, 16, 16, 0)]


# --- against llama.cpp ---------------------------------------------------------------------------

REPORT_KV = """
import ctypes, json, re, sys
import llama_cpp as lib

lines = []

@lib.llama_log_callback
def log(level, text, user_data):
    lines.append(text.decode())

lib.llama_log_set(log, ctypes.c_void_p(0))
lib.llama_backend_init()
results = []
for path, type_k, type_v, flash in json.load(sys.stdin):
    del lines[:]
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 65536, 1, 1, 1
    params.swa_full = params.kv_unified = True
    params.type_k, params.type_v, params.flash_attn_type = type_k, type_v, flash
    context = lib.llama_init_from_model(model, params) if model else None
    sizes = re.findall(r"KV buffer size = +([0-9.]+) MiB", "".join(lines))
    recurrent = model and (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model))
    results.append([sum(map(float, sizes)) if context else "".join(lines)[-900:], bool(recurrent)])
    if context:
        lib.llama_free(context)
    if model:
        lib.llama_model_free(model)
print(json.dumps(results))
"""
"""Load models in a subprocess (the log callback is global) and print their KV MiB."""

N_CONTEXT = 65536
CODES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
H = gb.HIDDEN
Case = tuple[Path, str, str, bool]  # file, type_k, type_v, flash attention


def write(folder: Path, architecture: str, tensors: dict, **changes: Any) -> Path:
    """Write a model that llama.cpp loads: no tokenizer; F32 tensors by name."""
    metadata = gb.model_metadata(architecture, **changes)
    metadata["tokenizer.ggml.model"] = ("str", "none")
    metadata[f"{architecture}.vocab_size"] = ("u32", gb.VOCAB)
    del metadata["tokenizer.ggml.tokens"]
    return gb.write_model(folder / f"{architecture}.gguf", metadata, tensors)


def u32(*values: int) -> tuple[str, Any]:
    return ("u32", values[0]) if len(values) == 1 else ("[u32]", list(values))


def dense(folder: Path) -> list[Case]:
    changes = {"rope__dimension_count": u32(32)}
    changes |= {f"attention__{kind}_length": u32(32) for kind in ("key", "value")}
    changes |= {"attention__head_count": u32(2), "attention__head_count_kv": u32(1)}
    path = write(folder, "llama", gb.model_tensors(), **changes)
    cases = [(path, k, v, True) for k, v in (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"))]
    return cases + [(path, k, "f16", False) for k in ("f32", "bf16", "q4_0")]


def uneven_heads(folder: Path) -> list[Case]:
    """Layers with four, two and no key heads."""
    tensors = gb.model_tensors(2)
    for role in ("attn_k", "attn_v"):
        tensors[f"blk.0.{role}.weight"] = ("F32", (H, H))
    tensors |= {name: item for name, item in gb.layer_tensors(2).items() if ".ffn" in name}
    changes = {"attention__head_count_kv": u32(4, 2, 0), "attention__head_count": u32(4, 4, 0)}
    changes |= {"block_count": u32(3), "feed_forward_length": u32(128, 128, 128)}
    path = write(folder, "deci", tensors, **changes)
    return [(path, "f16", "f16", flash) for flash in (False, True)]


def add_norms(tensors: dict, layer: int, head_size: int) -> None:
    sizes = {"attn_q_norm": head_size, "attn_k_norm": head_size}
    for name, size in (sizes | {"post_attention_norm": H, "post_ffw_norm": H}).items():
        tensors[f"blk.{layer}.{name}.weight"] = ("F32", (size,))


def windows(folder: Path) -> list[Case]:
    """Gemma 3: five of six layers have a window; the cache still has full length."""
    tensors = gb.model_tensors(6, tied=True)
    for i in range(6):
        add_norms(tensors, i, 16)
    changes = {f"attention__{kind}_length": u32(16) for kind in ("key", "value")}
    changes |= {"block_count": u32(6), "attention__sliding_window": u32(64)}
    return [(write(folder, "gemma3", tensors, **changes), "f16", "f16", True)]


def windows_of_another_head_size(folder: Path) -> list[Case]:
    """Gemma 4: windowed layers have smaller heads, the last two share the first two's cache."""
    tensors = gb.model_tensors(4, tied=True)
    tensors["rope_freqs.weight"] = ("F32", (16,))
    for i in range(4):
        size = 32 if i % 2 else 16
        tensors[f"blk.{i}.attn_q.weight"] = ("F32", (4 * size, H))
        tensors[f"blk.{i}.attn_output.weight"] = ("F32", (H, 4 * size))
        for role in ("attn_k", "attn_v"):
            tensors[f"blk.{i}.{role}.weight"] = ("F32", (2 * size, H))
        add_norms(tensors, i, size)
    changes = {f"attention__{kind}_length": u32(32) for kind in ("key", "value")}
    changes |= {f"attention__{kind}_length_swa": u32(16) for kind in ("key", "value")}
    changes |= {"rope__dimension_count": u32(32), "rope__dimension_count_swa": u32(16)}
    changes |= {"block_count": u32(4), "attention__sliding_window": u32(64)}
    changes["attention__sliding_window_pattern"] = ("[bool]", [True, False, True, False])
    changes |= {"attention__shared_kv_layers": u32(2), "embedding_length_per_layer_input": u32(0)}
    path = write(folder, "gemma4", tensors, **changes)
    return [(path, "f16", "f16", flash) for flash in (False, True)]


def experts() -> dict:
    changes = {"expert_count": u32(4), "expert_used_count": u32(2), "expert_shared_count": u32(1)}
    return changes | {"expert_feed_forward_length": u32(32), "expert_weights_scale": ("f32", 1.0)}


def compressed(folder: Path) -> list[Case]:
    """DeepSeek 2: latent attention."""
    rank, rope, head = 64, 16, 16
    shapes = {
        "attn_norm": (H,), "attn_q_a": (32, H), "attn_q_a_norm": (32,),
        "attn_q_b": (4 * (head + rope), 32), "attn_kv_a_mqa": (rank + rope, H),
        "attn_kv_a_norm": (rank,), "attn_k_b": (4, rank, head), "attn_v_b": (4, head, rank),
        "attn_output": (H, 4 * head), "ffn_norm": (H,), "ffn_gate": (128, H),
        "ffn_up": (128, H), "ffn_down": (H, 128),
    }  # fmt: skip
    tensors = gb.model_tensors(0)
    for i in range(2):
        tensors |= {f"blk.{i}.{name}.weight": ("F32", shape) for name, shape in shapes.items()}
    lengths = {"key_length": rank + rope, "value_length": rank, "key_length_mla": head + rope}
    lengths |= {"value_length_mla": head, "q_lora_rank": 32, "kv_lora_rank": rank}
    lengths["head_count_kv"] = 1
    changes = experts() | {f"attention__{key}": u32(size) for key, size in lengths.items()}
    changes |= {"leading_dense_block_count": u32(2), "rope__dimension_count": u32(rope)}
    path = write(folder, "deepseek2", tensors, **changes)
    return [(path, "f16", "f16", flash) for flash in (False, True)]


def predicting(folder: Path) -> list[Case]:
    """GLM 4.5: the last layer is for multi-token prediction."""
    tensors = gb.model_tensors(3)
    for i in range(3):
        tensors[f"blk.{i}.post_attention_norm.weight"] = tensors.pop(f"blk.{i}.ffn_norm.weight")
        for role, size in (("attn_q", H), ("attn_k", H // 2), ("attn_v", H // 2)):
            tensors[f"blk.{i}.{role}.bias"] = ("F32", (size,))
    shapes = {"eh_proj": (H, 2 * H), "enorm": (H,), "hnorm": (H,), "shared_head_norm": (H,)}
    tensors |= {f"blk.2.nextn.{name}.weight": ("F32", shape) for name, shape in shapes.items()}
    changes = experts() | {"block_count": u32(3), "nextn_predict_layers": u32(1)}
    changes |= {"leading_dense_block_count": u32(3)}
    changes |= {f"attention__{kind}_length": u32(16) for kind in ("key", "value")}
    return [(write(folder, "glm4moe", tensors, **changes), "f16", "f16", True)]


KINDS = (dense, uneven_heads, windows, windows_of_another_head_size, compressed, predicting)


@pytest.mark.gguf
def test_kv_bytes_are_what_llama_cpp_allocates(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    cases = [case for kind in KINDS for case in kind(tmp_path)]
    request = [[str(path), CODES[k], CODES[v], int(flash)] for path, k, v, flash in cases]
    done = subprocess.run(
        [sys.executable, "-c", REPORT_KV],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for (path, type_k, type_v, flash), (size, recurrent) in zip(cases, results, strict=True):
        assert isinstance(size, float), (path.name, size)
        model = load_gguf_model(path)
        assert model.is_recurrent == recurrent
        n_bytes = model.kv_bytes_per_token(type_k, type_v, flash_attention=flash)
        # llama.cpp reports two decimals of a MiB.
        case = (path.name, type_k, type_v, flash)
        assert n_bytes * N_CONTEXT / 2**20 == pytest.approx(size, rel=0, abs=0.0051), case
