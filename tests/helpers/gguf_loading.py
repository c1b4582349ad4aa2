"""GGUF files with any metadata and tensors, loaded as a model or refused."""

from __future__ import annotations

from pathlib import Path

import gguf_bytes as gb
import pytest

from backends.gguf.model import GgufModel, load_gguf_model
from offload.formats.gguf_index import GgufError


def load(folder: Path, metadata: dict | None = None, tensors: dict | None = None) -> GgufModel:
    return load_gguf_model(gb.write_model(folder / "m.gguf", metadata, tensors))


def refused(
    folder: Path,
    match: str,
    metadata: dict | None = None,
    tensors: dict | None = None,
    error: type[Exception] = GgufError,
) -> None:
    with pytest.raises(error, match=match) as caught:
        load(folder, metadata, tensors)
    assert "\n" not in str(caught.value)
