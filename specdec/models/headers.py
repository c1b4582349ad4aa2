"""Checks of a model's files by their headers, without torch, transformers or llama.cpp."""

from __future__ import annotations

from pathlib import Path

from backends.checkpoint.kinds import refuse_other_kinds
from backends.gguf.model import load_gguf_model
from backends.heads.kinds import head_kind
from offload.formats.checkpoint import WeightIndex
from specdec.models.heads import refuse_head
from specdec.models.names import has_own_files, is_hub_id, resolve_model


def check_headers(model: str | Path, draft: str | Path | None) -> None:
    """Read the headers of a run's models that are on this disk; those of the hub are left out.

    Opening them checks more. Raises ModelNotFound, CheckpointError and UnsupportedModel.
    """
    if not is_hub_id(model):
        path = resolve_model(model)
        refuse_head(path)
        _read_headers(path)
    if draft is not None and has_own_files(draft) and not is_hub_id(draft):
        path = resolve_model(draft)
        if head_kind(path) is None:
            _read_headers(path)


def _read_headers(path: Path) -> None:
    if path.is_file():
        load_gguf_model(path)
    else:
        refuse_other_kinds(path)
        WeightIndex.from_directory(path)
