"""Shared helpers of the GGUF header tests."""

from __future__ import annotations

from pathlib import Path

import gguf_bytes as gb
import pytest

from offload.formats.gguf_header import GgufError, GgufFile

F32, I8, I64, Q4_0, Q4_K = 0, 24, 27, 2, 12
HUGE = 2**64 - 1


def read(folder: Path, content: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.unlink(missing_ok=True)  # overwriting would make ext4 write the old content out first
    path.write_bytes(content)
    return GgufFile.read(path)


def refused(folder: Path, content: bytes, match: str) -> None:
    with pytest.raises(GgufError, match=match) as caught:
        read(folder, content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(folder))
    assert ": " in str(caught.value)  # the remedy follows it


def one_tensor(ne=(4,), code=F32, offset=0, name="t", **kwargs) -> bytes:
    data = kwargs.pop("data", bytes(64))
    return gb.gguf(tensors=[gb.tensor(name, ne, code, offset)], data=data, **kwargs)
