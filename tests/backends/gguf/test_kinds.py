"""GGUF files without a causal language model: recognised by header, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_bytes as gb
import pytest
from gguf_loading import load

from backends.contract.backend import UnsupportedModel
from backends.gguf.kinds import companion_kind
from backends.gguf.model import load_gguf_model

F32 = "F32"


def changed(architecture: str = "llama", **keys: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    return gb.model_metadata(architecture, **keys)


def beside(**tensors: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Add tensors beside a model's own."""
    more = {name.replace("__", "."): (F32, shape) for name, shape in tensors.items()}
    return gb.model_tensors() | more


def typed(kind: str) -> dict[str, tuple[str, Any]]:
    return {"general.type": ("str", kind)}


BARE = {"general.architecture": ("str", "llama")}
SINGLE = {"some.weight": (F32, (4,))}
HEAD = {"blk.2.nextn.eh_proj.weight": (F32, (4,)), "blk.2.attn_q.weight": (F32, (4,))}
NEXTN = {"block_count": ("u32", 3), "nextn_predict_layers": ("u32", 1)}

REST: list[tuple[str, dict, dict | None, str]] = [
    ("mmproj", typed("mmproj") | {"general.architecture": ("str", "clip")}, SINGLE, "projector"),
    ("old mmproj", {"general.architecture": ("str", "clip")}, SINGLE, "projector"),
    ("projector", typed("projector"), SINGLE, "projector"),
    ("adapter", typed("adapter") | BARE | {"adapter.type": ("str", "lora")}, SINGLE, "LoRA"),
    ("adapter by key", BARE | {"adapter.type": ("str", "lora")}, SINGLE, "LoRA"),
    ("adapter by tensors", changed(), {"blk.0.attn_q.weight.lora_a": (F32, (4, 4))}, "LoRA"),
    ("imatrix", typed("imatrix") | {"imatrix.chunk_count": ("u32", 1)},
     SINGLE, "importance matrix"),
    ("control vector", {"general.architecture": ("str", "controlvector")},
     SINGLE, "control vector"),
    ("vocabulary", changed(), {}, "vocabulary without weights"),
    ("vocabulary by type", typed("vocab") | changed(), {}, "vocabulary without weights"),
    ("mean", changed("qwen3", pooling_type=("u32", 1)), None, "an embedding model"),
    ("cls", changed("llama", pooling_type=("u32", 2)), None, "an embedding model"),
    ("last", changed("qwen3", pooling_type=("u32", 3)), None, "an embedding model"),
    ("rank", changed("qwen3", pooling_type=("u32", 4)), None, "a reranker"),
    ("labels", changed("qwen2", classifier__output_labels=("[str]", ["a"])), None, "a classifier"),
    ("class head", changed("qwen3"), beside(cls__output__weight=(2, 64)), "a classifier"),
    ("class bias", changed("llama"), beside(cls__bias=(4,)), "a classifier"),
    ("dense", changed("gemma3"), beside(dense_2__weight=(64, 64)), "an embedding model"),
    ("not causal", changed("qwen3", attention__causal=("bool", False)), None, "an encoder"),
    ("encoder", changed("bert"), None, "an encoder"),
    ("encoder-decoder", changed("t5"), None, "an encoder-decoder"),
    ("diffusion", changed("llada"), None, "a diffusion model"),
    ("eagle", changed("eagle3"), None, "a draft head"),
    ("dflash", changed("dflash"), None, "a DFlash head, a draft head, which runs only beside"),
    ("assistant", changed("gemma4-assistant"), None, "beside the target's checkpoint"),
    ("draft vocabulary", changed("llama"), beside(d2t=(96,)), "a draft head"),
    ("draft figures", changed("llama", target_hidden_size=("u32", 64)), None, "a draft head"),
    ("mtp", changed("glm4", **NEXTN), HEAD, "a draft head"),
    ("mtp with tokens", changed("glm4", **NEXTN), HEAD | {"token_embd.weight": (F32, (96, 64))},
     "a draft head"),
    ("pictures", {"general.architecture": ("str", "flux")}, SINGLE, "no tokens"),
    ("vision", {"general.architecture": ("str", "vit")}, {"v.blk.0.w": (F32, (4,))}, "no tokens"),
]  # fmt: skip
"""(name, metadata, tensors or those of a model, expected kind)"""

MODELS = [
    ("plain", changed(), None),
    ("typed", typed("model") | changed(), None),
    ("causal", changed("qwen3", attention__causal=("bool", True)), None),
    ("no pooling", changed("qwen3", pooling_type=("u32", 0)), None),
    ("mtp beside layers", changed("glm4", **NEXTN), gb.model_tensors(2) | HEAD),
    ("layers without their mtp", changed("glm4", **NEXTN), gb.model_tensors(2)),
    ("another type", typed("finetune") | changed(), None),
]


@pytest.mark.parametrize(("metadata", "tensors", "kind"), [x[1:] for x in REST],
                         ids=[x[0] for x in REST])  # fmt: skip
def test_what_is_no_language_model_is_refused_by_name(
    tmp_path: Path, metadata: dict, tensors: dict | None, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gb.make_file(metadata, gb.model_tensors() if tensors is None else tensors))
    assert kind in (companion_kind(path) or "")
    with pytest.raises(UnsupportedModel, match=kind) as caught:
        load_gguf_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("metadata", "tensors"), [x[1:] for x in MODELS],
                         ids=[x[0] for x in MODELS])  # fmt: skip
def test_language_models_are_none_of_these(
    tmp_path: Path, metadata: dict, tensors: dict | None
) -> None:
    assert load(tmp_path, metadata, tensors).n_layers == 2
    assert companion_kind(tmp_path / "m.gguf") is None


def test_the_first_file_of_a_split_model_may_have_no_tensors(tmp_path: Path) -> None:
    """Split with llama.cpp's --no-tensor-first-split; such a file is no vocabulary."""
    first, _ = gb.write_splits(tmp_path, changed(), [{}, gb.model_tensors()])
    assert companion_kind(first) is None
    assert load_gguf_model(first).n_layers == 2


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model", gb.gguf()[:20]])
def test_what_cannot_be_read_is_left_to_who_opens_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert companion_kind(path) is None
    with pytest.raises(Exception, match=r"m\.gguf"):
        load_gguf_model(path)


def test_pooling_is_numbered_as_in_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    from backends.gguf.kinds import _POOLED

    assert set(_POOLED) == {int(item) for item in gguf.PoolingType} - {gguf.PoolingType.NONE}
    names = {gguf.GGUFType.ADAPTER, gguf.GGUFType.IMATRIX, gguf.GGUFType.MMPROJ}
    from backends.gguf.kinds import _FILE_KINDS

    assert names <= set(_FILE_KINDS)
