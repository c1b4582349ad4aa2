"""The draft head of a target, of any format; imports the libraries of that format alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoint.kinds import config_parts, read_raw
from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions, ModelSource
from backends.gguf.heads import can_run_head
from backends.gguf.model import load_gguf_model
from backends.heads.kinds import ASSISTANT, DFLASH, MTP, NAMES, head_kind
from backends.heads.mtp_files import mtp_tensors
from offload.formats.checkpoint import WeightIndex

if TYPE_CHECKING:
    from backends.heads.target import HeadTarget
    from backends.hf.source import HfSource


def has_mtp_head(path: Path) -> bool:
    """Return whether a target has an MTP head of its own, which runs if it is a GGUF model.

    path: result of `resolve_model`. Raises CheckpointError for a damaged one, UnsupportedModel for
    a GGUF file that is no language model.
    """
    if path.is_file():
        return can_run_head(load_gguf_model(path))
    counts = [part.get("num_hidden_layers") for part in config_parts(read_raw(path))]
    n_layers = next((n for n in reversed(counts) if isinstance(n, int)), None)
    return n_layers is not None and bool(mtp_tensors(WeightIndex.from_directory(path), n_layers))


def mtp_source(target: ModelSource, options: BackendOptions) -> ModelSource:
    """Return the source of a target's own MTP head. Raises UnsupportedModel if it has none."""
    checkpoint = _checkpoint(target)
    if checkpoint is not None:
        from backends.heads.source import MtpSource

        return MtpSource(checkpoint, options)
    if "backends.llama.source" in sys.modules:
        from backends.heads.gguf_source import GgufHeadSource
        from backends.llama.source import GgufSource

        if isinstance(target, GgufSource):
            return GgufHeadSource(target, options)
    raise UnsupportedModel(f"{target.path}: MTP heads of this format are not supported")


def open_head(path: Path, target: ModelSource, options: BackendOptions) -> ModelSource | None:
    """Return the source of a draft head in files of its own; None if `path` is no head of a kind
    that runs beside a target here.

    path: result of `resolve_model`. Raises UnsupportedModel if it does not fit the target.
    """
    kind = head_kind(path)
    if kind is None:
        return None
    if kind in (MTP, ASSISTANT):
        return _of_checkpoint(kind, path, target, options)
    head_target = _head_target(target, options)
    if kind == DFLASH:
        from backends.heads.dflash.source import DFlashSource

        return DFlashSource(head_target, options, path)
    from backends.heads.source import Eagle3Source

    return Eagle3Source(path, head_target, options)


def _of_checkpoint(
    kind: str, path: Path, target: ModelSource, options: BackendOptions
) -> ModelSource:
    """Return the source of a head that drafts for checkpoints alone."""
    checkpoint = _checkpoint(target)
    if checkpoint is None:
        own = " take a GGUF file that has the head in it (-md mtp), or" if kind == MTP else ""
        raise UnsupportedModel(
            f"{path} is {NAMES[kind]}, which drafts for checkpoints alone, and {target.path} "
            f"is a GGUF model:{own} name an EAGLE-3 or DFlash head, or a draft model"
        )
    if kind == ASSISTANT:
        from backends.heads.assistant import AssistantSource

        return AssistantSource(checkpoint, options, path)
    from backends.heads.source import MtpSource

    return MtpSource(checkpoint, options, path)


def _head_target(target: ModelSource, options: BackendOptions) -> HeadTarget:
    """Describe a target to a head, which runs on torch beside a model of any format."""
    checkpoint = _checkpoint(target)
    if checkpoint is not None:
        from backends.heads.target import CheckpointTarget

        return CheckpointTarget(checkpoint.model)
    from backends.heads.gguf_target import GgufTarget
    from backends.llama.source import GgufSource

    if not isinstance(target, GgufSource):
        raise UnsupportedModel(f"{target.path}: draft heads of this format are not supported")
    return GgufTarget(target, options.n_threads)


def _checkpoint(target: ModelSource) -> HfSource | None:
    """Return a target that is a checkpoint on torch; None for any other."""
    if "backends.hf.source" not in sys.modules:
        return None
    from backends.hf.source import HfSource

    return target if isinstance(target, HfSource) else None
