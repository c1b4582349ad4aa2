"""Which file of a checkpoint to measure the storage with."""

from __future__ import annotations

from pathlib import Path

from offload.index import WeightIndex


def largest_weight_file(directory: Path) -> Path:
    """The largest weight file of a checkpoint: the longest, steadiest reads are possible there."""
    paths = {record.path for record in WeightIndex.from_directory(directory).values()}
    return max(paths, key=lambda path: path.stat().st_size)
