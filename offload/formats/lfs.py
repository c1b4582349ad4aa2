"""Git LFS pointers: a few lines of text in place of a large file that was not fetched
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""

from __future__ import annotations

import re
from pathlib import Path

from offload.formats.tensors import CheckpointError
from offload.units import format_bytes

_VERSION = b"version https://git-lfs.github.com/spec/"
_MAX_BYTES = 1024
"""The specification's limit in bytes, exclusive."""
_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer; False if it cannot be read."""
    return bool(_pointer_text(path))


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a pointer; the message has the size of the actual file."""
    text = _pointer_text(path)
    if not text:
        return
    size = _SIZE.search(text)
    what = "a file" if size is None else f"a file of {format_bytes(int(size[1]))}"
    raise CheckpointError(
        f"{path} is a Git LFS pointer to {what} that was not fetched: run `git lfs pull` in its "
        "folder, or download the file itself"
    )


def _pointer_text(path: Path) -> bytes:
    try:
        if not path.is_file() or path.stat().st_size >= _MAX_BYTES:
            return b""
        text = path.read_bytes()
    except OSError:
        return b""
    return text if text.startswith(_VERSION) else b""
