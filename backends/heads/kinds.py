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

EAGLE3, DFLASH, MTP = "eagle3", "dflash", "mtp"
NAMES = {EAGLE3: "an EAGLE-3 head", DFLASH: "a DFlash head", MTP: "an MTP head"}
DFLASH_FAMILY = "muse_glimmer_assistant"
"""model_type of DFlash heads in transformers' layout."""
_DFLASH_CLASSES = ("DFlashDraftModel", "DFlash2DraftModel")
_SIZES = ("hidden_size", "vocab_size")
_SEVERAL_STREAMS = ("gemma3n",)
"""Architectures whose layers have several streams of hidden states."""
_EAGLE3_CLASS = re.compile(r"eagle-?3", re.IGNORECASE)


def head_kind(path: Path) -> str | None:
    """Return EAGLE3, MTP or DFLASH (of either version) for such a head; None for any other folder
    or file, and for one that cannot be read: opening it then raises an error.

    path: a folder with config.json, or a GGUF file.
    """
    if path.is_dir():
        config = read_raw(path)
        if _is_dflash(config):
            return DFLASH
        if config.get("architectures") == [MTP_CLASS]:
            return MTP
        return EAGLE3 if _is_eagle3(config) else None
    try:
        architecture = GgufFile.read(path).metadata.get("general.architecture")
    except CheckpointError:
        return None
    return EAGLE3 if architecture == EAGLE3 else None


def may_fit(head: Path, target: Path) -> bool:
    """Return whether a head has the hidden size and vocabulary of a target, which is a checkpoint
    or a GGUF file whose passes return outputs of layers.

    Opening it checks more, and no file names the weights that a head was trained for.
    """
    sizes = _sizes_of_target(target)
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
        layer = {**raw, **(raw.get("transformer_layer_config") or {})}
        return {key: layer.get(key) for key in _SIZES}
    metadata = GgufFile.read(path).metadata
    width = metadata.get(f"{EAGLE3}.target_hidden_size")
    return dict(zip(_SIZES, (width, _num_tokens(metadata, EAGLE3)), strict=True))


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
