"""Kinds of draft heads in files of their own, recognised by config.json or the GGUF header.

Neither torch nor gguf is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.checkpoint.kinds import read_raw
from backends.heads.mtp_files import MTP_CLASS
from offload.formats.gguf_header import GgufFile
from offload.formats.tensors import CheckpointError

EAGLE3, MTP = "eagle3", "mtp"
NAMES = {EAGLE3: "an EAGLE-3 head", MTP: "an MTP head"}
_EAGLE3_CLASS = re.compile(r"eagle-?3", re.IGNORECASE)


def head_kind(path: Path) -> str | None:
    """Return EAGLE3 or MTP for such a head; None for any other folder or file, and for one that
    cannot be read: opening it then raises an error.

    path: a folder with config.json, or a GGUF file.
    """
    if path.is_dir():
        config = read_raw(path)
        if config.get("architectures") == [MTP_CLASS]:
            return MTP
        return EAGLE3 if _is_eagle3(config) else None
    try:
        architecture = GgufFile.read(path).metadata.get("general.architecture")
    except CheckpointError:
        return None
    return EAGLE3 if architecture == EAGLE3 else None


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a config describes an EAGLE-3 head, as llama.cpp's converter decides: some
    have the class of a whole model, and one layer with a vocabulary of its own."""
    named = config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if config.get("speculators_model_type") == EAGLE3 or any(map(_EAGLE3_CLASS.search, classes)):
        return True
    is_language_model = bool(classes) and all(name.endswith("ForCausalLM") for name in classes)
    return (
        is_language_model and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    )
