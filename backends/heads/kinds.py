"""Kinds of draft heads in files of their own, recognised by config.json or the GGUF header.

Neither torch nor gguf is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.checkpoint.kinds import config_parts, read_raw
from backends.heads.mtp_files import MTP_CLASS
from offload.formats.gguf_header import GgufFile, GgufMetadata
from offload.formats.tensors import CheckpointError

EAGLE3, DFLASH, MTP, ASSISTANT = "eagle3", "dflash", "mtp", "assistant"
NAMES = {
    EAGLE3: "an EAGLE-3 head",
    DFLASH: "a DFlash head",
    MTP: "an MTP head",
    ASSISTANT: "a Gemma 4 assistant",
}
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""model_type of assistants in transformers."""
ASSISTED = ("gemma4_text", "gemma4_unified_text")
"""model_type of the language models that they are for."""
DFLASH_FAMILY = "muse_glimmer_assistant"
"""model_type of DFlash heads in transformers' layout."""
_DFLASH_CLASSES = ("DFlashDraftModel", "DFlash2DraftModel")
OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of dflash_config that DFlash 2 heads alone have."""
_OF_DSPARK = ("markov_w1.weight", "markov_w2.weight")
"""Tensors of DSpark heads, which have DFlash's architecture in GGUF and are not run."""
_SIZES = ("hidden_size", "vocab_size")
_SEVERAL_STREAMS = ("gemma3n",)
"""Architectures whose layers have several streams of hidden states."""
_EAGLE3_CLASS = re.compile(r"eagle-?3", re.IGNORECASE)


def head_kind(path: Path) -> str | None:
    """Return EAGLE3, MTP, ASSISTANT or DFLASH (of either version) for such a head; None for any
    other folder or file, and for one that cannot be read: opening it then raises an error.

    path: a folder with config.json, or a GGUF file.
    """
    if path.is_dir():
        config = read_raw(path)
        if _is_dflash(config):
            return DFLASH
        if config.get("architectures") == [MTP_CLASS]:
            return MTP
        if config.get("model_type") in _ASSISTANTS:
            return ASSISTANT
        return EAGLE3 if _is_eagle3(config) else None
    try:
        architecture = GgufFile.read(path).metadata.get("general.architecture")
    except CheckpointError:
        return None
    return architecture if architecture in (EAGLE3, DFLASH) else None


def is_dflash2(head: Path) -> bool:
    """Return whether a DFlash head is one of the second version."""
    if head.is_file():
        metadata = GgufFile.read(head).metadata
        return any(f"{DFLASH}.{name}" in metadata for name in OF_DFLASH2)
    block = read_raw(head).get("dflash_config")
    return isinstance(block, dict) and any(name in block for name in OF_DFLASH2)


def may_fit(head: Path, target: Path) -> bool:
    """Return whether a head has the hidden size and vocabulary of a target, which is a checkpoint
    or a GGUF file whose passes return outputs of layers.

    Opening it checks more, and no file names the weights that a head was trained for.
    """
    sizes = _sizes_of_target(target)
    if head_kind(head) == ASSISTANT and sizes.get("model_type") not in ASSISTED:
        return False
    if head.is_file() and not {t.name for t in GgufFile.read(head).tensors}.isdisjoint(_OF_DSPARK):
        return False
    own = _sizes_of_head(head)
    return all(own[key] in (None, sizes.get(key)) for key in _SIZES)


def _sizes_of_target(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        *_, sizes = config_parts(read_raw(path))
        return sizes
    metadata = GgufFile.read(path).metadata
    architecture = metadata.get("general.architecture")
    if architecture in _SEVERAL_STREAMS:
        return {}
    width = metadata.get(f"{architecture}.embedding_length")
    return dict(zip(_SIZES, (width, _num_tokens(metadata, architecture)), strict=True))


def _sizes_of_head(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        raw = read_raw(path)
        *_, own = config_parts(raw)
        layer = {**own, **(raw.get("transformer_layer_config") or {})}
        if head_kind(path) == ASSISTANT:
            layer["hidden_size"] = raw.get("backbone_hidden_size")
        return {key: layer.get(key) for key in _SIZES}
    metadata, kind = GgufFile.read(path).metadata, head_kind(path)
    key = "target_hidden_size" if kind == EAGLE3 else "embedding_length"
    width = metadata.get(f"{kind}.{key}")
    return dict(zip(_SIZES, (width, _num_tokens(metadata, kind)), strict=True))


def _num_tokens(metadata: GgufMetadata, architecture: Any) -> Any:
    stored = metadata.get(f"{architecture}.vocab_size")
    return stored or metadata.array_length("tokenizer.ggml.tokens")


def _is_dflash(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    classes = named if isinstance(named, list) else ()
    is_class = any(name in classes for name in _DFLASH_CLASSES)
    return is_class or config.get("model_type") == DFLASH_FAMILY


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a config describes an EAGLE-3 head, as llama.cpp's converter decides: some
    have the class of a whole model, and one layer with a vocabulary of its own."""
    named = config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if config.get("speculators_model_type") == EAGLE3 or any(map(_EAGLE3_CLASS.search, classes)):
        return True
    is_language_model = bool(classes) and all(name.endswith("ForCausalLM") for name in classes)
    return (
        is_language_model and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    )
