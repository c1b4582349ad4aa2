"""Selection of language models among files and folders, by their headers: projectors, adapters,
importance matrices, vocabularies and draft heads lie beside models and are not meant by -m.

Neither torch nor llama.cpp is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from backends.checkpoint.kinds import other_kind
from backends.gguf.kinds import companion_kind, header_kind
from offload.formats.lfs import is_pointer
from offload.formats.tensors import CheckpointError

_POINTER = "a Git LFS pointer: run `git lfs pull` in its folder"


def no_model(path: Path) -> str | None:
    """Return a description of a GGUF file or folder that is no causal language model.

    None for a model, and for a file that cannot be read: opening it raises the reason.
    """
    if path.is_dir():
        is_absent = any(map(is_pointer, path.glob("*.safetensors")))
        return _POINTER if is_absent else other_kind(path)
    return _POINTER if is_pointer(path) else companion_kind(path)


def is_model(path: Path) -> bool:
    """Return whether a GGUF file or folder is a causal language model; False for a GGUF file whose
    header cannot be read, as one that is still being downloaded."""
    if path.is_dir():
        return no_model(path) is None
    try:
        return header_kind(path) is None
    except CheckpointError:
        return False


def models_among(files: Iterable[Path]) -> list[Path]:
    """Return the files that can be language models."""
    return [path for path in files if no_model(path) is None]
