"""Outlines: files that have a model's header and, in place of its weights, a hole.

An outline is as long as the file that it stands for and takes almost no storage. What reads headers
alone, as planning does, needs no other file. Reading the hole would tell nothing of the storage:
beside the outlines lies a file of random bytes to measure it with.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.formats.tensors import CheckpointError
from offload.units import MIB, format_bytes

_SAMPLE = "storage-sample"
_SAMPLE_BYTES = 128 * MIB  # read in 20 ms at 6 GB/s; shorter measurements vary
_CHUNK_BYTES = 8 * MIB


def write_outline(path: Path, header: bytes, n_bytes: int) -> None:
    """Write a file of `n_bytes` that begins with `header`.

    Raises CheckpointError if the file system has no files of that size.
    """
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(n_bytes)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} cannot hold the outline of a file of {format_bytes(n_bytes)}: "
            f"{error.strerror or error}: set HF_HUB_CACHE to a folder on another one"
        ) from error


def mark_outlines(folder: Path) -> None:
    """Mark all files of a folder as outlines, by the file to measure its storage with."""
    path = folder / _SAMPLE
    try:
        with path.open("wb") as file:
            for _ in range(_SAMPLE_BYTES // _CHUNK_BYTES):
                file.write(os.urandom(_CHUNK_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot hold {format_bytes(_SAMPLE_BYTES)} to measure the storage with: "
            f"{error.strerror or error}: free storage there, or set HF_HUB_CACHE to another folder"
        ) from error


def is_outline(path: Path) -> bool:
    """Return whether a file is an outline."""
    return path.with_name(_SAMPLE).is_file()


def measured_file(path: Path) -> Path:
    """Return the file to measure the storage of a weight file with: itself, if it is whole."""
    return path.with_name(_SAMPLE) if is_outline(path) else path
