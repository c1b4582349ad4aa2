"""From what a user types for a model to a directory on disk.

pair:target              the embedded pair
path/to/checkpoint       a local directory
user/repo[@revision]     a Hugging Face hub id, downloaded or taken from the local cache
"""

from __future__ import annotations

import re
from pathlib import Path

from offload.errors import SpecdecError
from specdec.pair import PAIR_PREFIX, pair_path

# Safetensors and what describes them: pickles and code of the repository are never fetched.
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


class ModelNotFound(SpecdecError):
    """A model name leads to no checkpoint."""


def resolve_model(name: str | Path) -> Path:
    """The directory of a model. Raises ModelNotFound with what was tried."""
    text = str(name)
    if text.startswith(PAIR_PREFIX):
        try:
            return pair_path(text)
        except (ValueError, FileNotFoundError) as error:
            raise ModelNotFound(str(error)) from error
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFound(f"{path} is a file: name the directory that holds the checkpoint")
    if _HUB_ID.fullmatch(text):
        return _from_hub(text)
    raise ModelNotFound(f"no such model directory: {path}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repo_id, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repo_id, revision=revision or None, allow_patterns=list(_WANTED))
    except Exception as error:  # the hub client raises many kinds; each is one line here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{name} is neither a directory nor in the local hub cache, "
            f"and it cannot be downloaded: {reason}"
        ) from error
    return Path(folder)
