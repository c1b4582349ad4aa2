"""Safetensors files written byte by byte, and checkpoints that must be refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError

GOOD: dict[str, Any] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.unlink(missing_ok=True)  # overwriting would make ext4 write the old content out first
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        WeightIndex.from_directory(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000 + 2 * len(str(folder))
