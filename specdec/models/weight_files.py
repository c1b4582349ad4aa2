"""Files of a model's weights, and a fingerprint of the weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from offload.formats.checkpoint import WeightIndex
from offload.formats.fingerprint import fingerprint
from offload.formats.outline import measured_file

_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer.json")
_DIGITS = 16


def weight_files(model: Path) -> list[Path]:
    """Return the files with a model's weights, of a checkpoint directory or a GGUF file."""
    if model.is_file():
        from offload.formats.gguf_index import GgufIndex

        return list(GgufIndex.from_path(model).paths)
    return sorted({record.path for record in WeightIndex.from_directory(model).values()})


def largest_weight_file(model: Path) -> Path:
    """Return the largest weight file, which allows the longest and steadiest reads."""
    return measured_file(max(weight_files(model), key=lambda path: path.stat().st_size))


def weights_fingerprint(model: Path) -> str:
    """Return hex digits that differ between a model, its fine-tunes, and other models at its path.

    Copies have the same digits. Only headers and a few bytes of each tensor are read.
    """
    if model.is_file():
        from offload.formats.gguf_index import GgufIndex

        index = GgufIndex.from_path(model)
        metadata = index.metadata
        single = [key for key in sorted(metadata) if metadata.array_length(key) is None]
        description = str({key: metadata[key] for key in single})
        return fingerprint(index.values(), description)[:_DIGITS]
    files = [path for name in _BESIDE_WEIGHTS if (path := model / name).is_file()]
    description = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return fingerprint(WeightIndex.from_directory(model).values(), description)[:_DIGITS]
