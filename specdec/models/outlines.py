"""Models for plans: outlines in place of those whose weights are not on this disk.

A model on the hub is planned from its headers (`specdec.models.hub`), a folder with a config.json
alone from the tensors that transformers would make of it. Both become outlines in a temporary
folder in the hub's cache, whose storage a download would be read from.
"""

from __future__ import annotations

import atexit
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from offload.formats.checkpoint import WeightIndex
from offload.formats.outline import mark_outlines
from offload.formats.tensors import CheckpointError
from offload.units import format_bytes
from specdec.models.hub import BESIDE_WEIGHTS, HubRepository
from specdec.models.names import (
    CHECKPOINT_PATTERNS,
    ModelNotFound,
    gguf_patterns,
    has_own_files,
    model_in,
    parse_hub_id,
    resolve_model,
)

logger = logging.getLogger(__name__)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
_PREFIX = ".specdec-"
_MAX_SECONDS = 24 * 3600
"""Age of a temporary folder that no process uses any more."""
_outlines: dict[str, Path] = {}
"""Outlines of this process, by the name of the model."""


def planned_model(name: str | Path) -> Path:
    """Return a directory or a GGUF file with the model's headers: the model itself where it is on
    this disk, else an outline.

    Raises ModelNotFound, HubError, and CheckpointError for headers that are malformed.
    """
    hub_id = parse_hub_id(name)
    if hub_id is None:
        path = resolve_model(name)
        return _once(path, _outline_of_config) if _is_config_alone(path) else path
    return _downloaded(hub_id) or _once(name, _outline_of_hub)


def planned_name(name: str | Path) -> str | Path:
    """Return the path of a model's outline, or the name of a model that is on this disk, or of a
    draft without files of its own. Raises what `planned_model` raises."""
    if not has_own_files(name):
        return name
    path = planned_model(name)
    return path if path in _outlines.values() else name


def _once(name: str | Path, make: Callable[[str | Path], Path]) -> Path:
    key = str(name)
    if key not in _outlines:
        _outlines[key] = make(name)
    return _outlines[key]


def _is_config_alone(path: Path) -> bool:
    if not path.is_dir() or not (path / "config.json").is_file():
        return False
    return not any(any(path.glob(pattern)) for pattern in _WEIGHTS)


def _downloaded(hub_id: re.Match[str]) -> Path | None:
    """Return the model in the hub's cache; None if it, or a part of it, is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    part = hub_id["file"]
    patterns = gguf_patterns(part) if part else list(CHECKPOINT_PATTERNS)
    try:
        folder = snapshot_download(
            hub_id["repo"],
            revision=hub_id["revision"],
            allow_patterns=patterns,
            local_files_only=True,
        )
        path = model_in(Path(folder), part or "")
        if path.is_dir():
            WeightIndex.from_directory(path)
    except (LocalEntryNotFoundError, ValueError, ModelNotFound, CheckpointError):
        return None  # ValueError: no hub id, which the hub's client will say
    return path


def _outline_of_hub(name: str | Path) -> Path:
    hub_id = parse_hub_id(name)
    assert hub_id is not None
    repository = HubRepository(hub_id["repo"], hub_id["revision"])
    folder = new_outline_folder(hub_id["repo"])
    if hub_id["file"]:
        path = repository.write_gguf(hub_id["file"], folder)
    else:
        repository.write_checkpoint(folder)
        path = folder
    mark_outlines(folder)
    weights = [x for kind in ("*.safetensors", "*.gguf") for x in folder.glob(kind)]
    n_bytes = sum(file.stat().st_size for file in weights)
    logger.warning(
        f"{name} is not on this disk: planned from its headers on the hub, {format_bytes(n_bytes)} "
        "to download"
    )
    return path


def _outline_of_config(name: str | Path) -> Path:
    directory = Path(name)
    from backends.checkpoint.config import load_config
    from backends.checkpoint.config_outline import write_config_outline

    load_config(directory)  # so that an error names the user's folder, not the outline's
    folder = new_outline_folder(directory.name)
    for pattern in BESIDE_WEIGHTS:
        for file in filter(Path.is_file, directory.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    n_bytes, dtype = write_config_outline(folder)
    mark_outlines(folder)
    logger.warning(
        f"{directory} has no weights: planned as {format_bytes(n_bytes)} in {dtype}, from its "
        "config.json"
    )
    return folder


def new_outline_folder(name: str) -> Path:
    """Make a temporary folder with this name; it is removed when the process ends."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{_PREFIX}*"):  # of processes that were killed
            if time.time() - old.stat().st_mtime > _MAX_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=cache))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        folder = root / name
        folder.mkdir(parents=True)
    except OSError as error:
        raise ModelNotFound(
            f"{cache} cannot be written to: {error.strerror or error}: set HF_HUB_CACHE to a "
            "folder with free storage"
        ) from error
    return folder
