"""The draft head of a target, of any format; imports the libraries of that format alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoint.kinds import config_parts, read_raw
from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions, ModelSource
from backends.heads.names import mtp_tensors
from offload.formats.checkpoint import WeightIndex

if TYPE_CHECKING:
    from backends.hf.source import HfSource


def has_mtp_head(path: Path) -> bool:
    """Return whether a target has an MTP head of its own.

    path: result of `resolve_model`. Raises CheckpointError for a damaged one.
    """
    if path.is_file():
        return False
    counts = [part.get("num_hidden_layers") for part in config_parts(read_raw(path))]
    n_layers = next((n for n in reversed(counts) if isinstance(n, int)), None)
    return n_layers is not None and bool(mtp_tensors(WeightIndex.from_directory(path), n_layers))


def head_source(target: ModelSource, options: BackendOptions) -> ModelSource:
    """Return the source of a target's own MTP head. Raises UnsupportedModel if it has none."""
    checkpoint = _checkpoint(target)
    if checkpoint is None:
        raise UnsupportedModel(f"{target.path}: MTP heads of GGUF models are not supported")
    from backends.heads.source import HeadSource

    return HeadSource(checkpoint, options)


def dflash_source(target: ModelSource, options: BackendOptions, directory: Path) -> ModelSource:
    """Return the source of a DFlash head in a folder of its own. Raises UnsupportedModel if it does
    not fit the target."""
    checkpoint = _checkpoint(target)
    if checkpoint is None:
        raise UnsupportedModel(
            f"{directory} is a draft head for a checkpoint, and {target.path} is a GGUF model: "
            "name a draft model, or run the target's checkpoint"
        )
    from backends.heads.dflash_source import DFlashSource

    return DFlashSource(checkpoint, options, directory)


def _checkpoint(target: ModelSource) -> HfSource | None:
    """Return a target that is a checkpoint on torch; None for any other."""
    if "backends.hf.source" not in sys.modules:
        return None
    from backends.hf.source import HfSource

    return target if isinstance(target, HfSource) else None
