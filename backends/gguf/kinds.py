"""Kinds of GGUF files, recognised by their headers: causal language models, and the other files
that accompany such models or look like one.

The keys and names are llama.cpp's (src/llama-arch.cpp, its converters, gguf.constants).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from backends.contract.backend import UnsupportedModel
from offload.formats.gguf_header import GgufFile, GgufMetadata
from offload.formats.tensors import CheckpointError

ENCODER = "an encoder, which gives embeddings and no next token"
LOOPED = "a model that runs its layers several times per token"
_DIFFUSION = "a diffusion model, which does not decode from left to right"
_DRAFT_HEAD = "a draft head, which runs only inside its target's context"
_ASSISTANT = (
    "a Gemma 4 assistant, a draft head, which drafts here from a folder with config.json and "
    "safetensors alone: name the published folder with -md (--draft-model), beside the target's "
    "checkpoint"
)
_BESIDE_TARGET = (
    "{} head, a draft head, which runs only beside its target: name the target with -m, and this "
    "head with -md (--draft-model)"
)
_SPEECH = "a part of a speech model"
_PROJECTOR = "a projector for images or sound (mmproj); pass the language model's own file"
_ADAPTER = "an adapter (LoRA); merge it into its model first"
_EMBEDDING = "an embedding model, which pools its output and gives no next token"
_RERANKER = "a reranker, which gives scores and no next token"
_CLASSIFIER = "a classifier, which gives labels and no next token"
_VOCABULARY = "a vocabulary without weights"
_NO_TOKENS = "no language model: it has no tokens and no embeddings of them"

REFUSED = {
    **dict.fromkeys(("bert", "modern-bert", "neo-bert", "eurobert", "llama-embed"), ENCODER),
    **dict.fromkeys(("nomic-bert", "nomic-bert-moe", "gemma-embedding"), ENCODER),
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v3", "t5encoder"), ENCODER),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    "dflash": _BESIDE_TARGET.format("a DFlash"),
    "gemma4-assistant": _ASSISTANT,
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), _SPEECH),
    "eagle3": _BESIDE_TARGET.format("an EAGLE-3"),
    "t5": "an encoder-decoder model, and specdec runs decoders only",
    "clip": _PROJECTOR,
    "hrm_text": LOOPED,
}
"""Refused kinds by general.architecture, among those that llama.cpp loads."""
_FILE_KINDS = {
    "adapter": _ADAPTER,
    "mmproj": _PROJECTOR,
    "projector": _PROJECTOR,
    "imatrix": "an importance matrix, not a model",
    "vocab": _VOCABULARY,
    "controlvector": "a control vector, which steers a model and is none",
}
"""Kinds by general.type, or by general.architecture if the file's tool writes the kind there."""
_POOLED = {1: _EMBEDDING, 2: _EMBEDDING, 3: _EMBEDDING, 4: _RERANKER}
"""Kinds by <architecture>.pooling_type (enum llama_pooling_type): mean, cls, last, rank."""

_EMBEDDINGS = "token_embd.weight"
_LORA = re.compile(r"\.lora_[ab]$")
_CLASSIFIER_TENSOR = re.compile(r"cls(\.output|\.norm)?\.(weight|bias)$")
_POOLED_TENSOR = re.compile(r"dense_[23]\.(weight|bias)$")
_DRAFT_TENSOR = re.compile(r"(d2t|nextn\.(pre|post)_projection)(\.weight)?$")
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_HEAD_LAYER = re.compile(r"blk\.(\d{1,5})\.nextn\.")


def other_kind(metadata: GgufMetadata, names: Collection[str] | None) -> str | None:
    """Return what a GGUF model is, if it is no causal language model: "a projector for ...".

    Args:
        names: names of all tensors; None if they are not known (one file of a split model).
    """
    architecture = _text(metadata, "general.architecture")
    for key in ("general.type", "general.architecture"):
        if _text(metadata, key) in _FILE_KINDS:
            return _FILE_KINDS[_text(metadata, key)]
    if "adapter.type" in metadata:
        return _ADAPTER
    if architecture in REFUSED:
        return REFUSED[architecture]
    kind = _by_keys(metadata, architecture)
    if kind is None and names is not None:
        kind = _by_tensors(metadata, architecture, names)
    return kind


def companion_kind(path: Path) -> str | None:
    """Return what a file is by its header, if it is no causal language model.

    None for a model, and for a file whose header cannot be read: opening it then raises an error.
    """
    try:
        return header_kind(path)
    except CheckpointError:
        return None


def header_kind(path: Path) -> str | None:
    """Return what a file is by its header; None for a model. Raises CheckpointError."""
    file = GgufFile.read(path)
    is_split = _number(file.metadata, "split.count") > 1
    names = None if is_split else {record.name for record in file.tensors}
    return other_kind(file.metadata, names)


def refuse_other_kinds(path: Path, metadata: GgufMetadata, names: Collection[str]) -> None:
    """Raise UnsupportedModel unless the file is a causal language model.

    names: names of all its tensors.
    """
    kind = other_kind(metadata, names)
    if kind is not None:
        architecture = _text(metadata, "general.architecture")
        shown = f" ({architecture:.64})" if architecture.isprintable() and architecture else ""
        raise UnsupportedModel(f"{path}{shown} is {kind}")


def _by_keys(metadata: GgufMetadata, architecture: str) -> str | None:
    if metadata.get(f"{architecture}.attention.causal") is False:
        return ENCODER
    pooling = _number(metadata, f"{architecture}.pooling_type")
    if pooling in _POOLED:
        return _POOLED[pooling]
    if f"{architecture}.classifier.output_labels" in metadata:
        return _CLASSIFIER
    if f"{architecture}.target_hidden_size" in metadata:
        return _DRAFT_HEAD
    return None


def _by_tensors(metadata: GgufMetadata, architecture: str, names: Collection[str]) -> str | None:
    has_tokens = "tokenizer.ggml.model" in metadata
    if not names:
        return _VOCABULARY if has_tokens else None
    kinds = {
        _LORA: _ADAPTER,
        _CLASSIFIER_TENSOR: _CLASSIFIER,
        _POOLED_TENSOR: _EMBEDDING,
        _DRAFT_TENSOR: _DRAFT_HEAD,
    }
    for pattern, kind in kinds.items():
        match = pattern.search if pattern is _LORA else pattern.match
        if any(map(match, names)):
            return kind
    if _is_head_alone(metadata, architecture, names):
        return _DRAFT_HEAD
    return None if has_tokens or _EMBEDDINGS in names else _NO_TOKENS


def _is_head_alone(metadata: GgufMetadata, architecture: str, names: Collection[str]) -> bool:
    """Return whether a file has no layers except those for multi-token prediction (MTP)."""
    n_heads = _number(metadata, f"{architecture}.nextn_predict_layers")
    n_layers = _number(metadata, f"{architecture}.block_count") - n_heads
    stored = {int(match[1]) for match in map(_LAYER.match, names) if match}
    heads = {int(match[1]) for match in map(_HEAD_LAYER.match, names) if match}
    return n_heads > 0 and bool(stored) and stored == heads and 0 <= n_layers <= min(stored)


def _text(metadata: GgufMetadata, key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _number(metadata: GgufMetadata, key: str) -> int:
    if metadata.array_length(key) is not None:
        return 0
    value = metadata.get(key)
    return value if type(value) is int else 0
