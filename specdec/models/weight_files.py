"""Which file of a model to measure the storage with."""

from __future__ import annotations

from pathlib import Path

from offload.formats.checkpoint import WeightIndex


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights: of a checkpoint directory or a GGUF file."""
    if model.is_file():
        from offload.formats.gguf_index import GgufIndex

        return list(GgufIndex.from_path(model).paths)
    return sorted({record.path for record in WeightIndex.from_directory(model).values()})


def largest_weight_file(model: Path) -> Path:
    """The largest one: the longest, steadiest reads are possible there."""
    return max(weight_files(model), key=lambda path: path.stat().st_size)
