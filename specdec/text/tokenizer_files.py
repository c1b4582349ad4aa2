"""The tokenizer files of a checkpoint: what is wrong with them is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends.contract.library_errors import one_line
from offload.errors import SpecdecError

# transformers makes a tokenizer from any of these.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


class TokenizerError(SpecdecError):
    """A tokenizer cannot be loaded, or lacks what was asked of it."""


def load_hf_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer; code that the checkpoint may carry is never run."""
    from transformers import AutoTokenizer

    _require_tokenizer_files(directory)
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the libraries raise
        raise TokenizerError(
            f"cannot load a tokenizer from {directory}: {one_line(error)}: "
            "take the tokenizer files of the original model"
        ) from error


def _require_tokenizer_files(directory: Path) -> None:
    """Raise TokenizerError where transformers would only list what it tried."""
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(
            f"{directory} has no tokenizer.json (nor {', '.join(_TOKENIZER_FILES[1:])}): "
            "copy the tokenizer files of the original model there"
        )
    settings = directory / "tokenizer_config.json"
    if not settings.is_file():
        return
    try:
        is_object = isinstance(json.loads(settings.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise TokenizerError(
            f"{settings} is not a JSON object: take the file of the original model"
        )
